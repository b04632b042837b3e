"""The names that a server serves, in a file of the store, so that the next server can serve the names at once.

Replicas that share a store have a file each. A replica without a file, such as a new pod of a Deployment, begins with
the names of all replicas that live or have ended within the hour.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import msgspec

from lora_plugins.adapter.paced_work import paced
from lora_plugins.lifecycle.registry import DesiredAdapter
from lora_plugins.log import logger
from lora_plugins.store.layout import Layout, append_small, key_of, replace_small

FORMAT = 1
# JSON with an entry on each line, so that a reader of this format need not parse all entries at once. Later changes
# follow the last line: entries, and names no longer served as texts; the last line is repeated after each write.
_FIRST_LINE = f'{{"format": {FORMAT}, "served": [\n'.encode()
_LAST_LINE = b"]}\n"
_LINE = msgspec.json.Decoder[DesiredAdapter | str](DesiredAdapter | str)
_PIECE = 500  # entries: a few milliseconds; with more changes than these, all entries are written again
_KEEP_S = 5.0
_LIVES_S = 20.0  # without a touch: four were missed
_LATELY_S = 3600.0
_KEPT_S = 7 * 86400.0
_WRITE_DELAY_S = 0.5
_WRITE_AGAIN_S = 1.0  # after a failed write, for example on a full disk
_WRITE_PAUSE = 10  # times the processor's time of the last write, so that 100,000 names are not written all the time
_WRITTEN_S = 10.0  # only a disk that does not answer takes longer
# The fields of a `DesiredAdapter`. A collection of garbage leaves out tuples of strings; 100,000 objects to visit would
# stop the event loop for 20 ms.
Fields = tuple[str, *tuple[str | bool | None, ...]]


class ServedFile:
    """The file of one replica and base model.

    Attributes:
        prefers_living: whether a replica without a file begins with the names of living replicas only, if any lives.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.prefers_living = path, False
        self._held: dict[str, Fields] = {}  # what this process has written last, by name
        self._state: tuple[int, ...] | None = None  # of the file then: a write that fails half way leaves another
        self._changes = 0  # after the last line

    @classmethod
    def of_store(cls, root: Path, base_path: str, replica: str) -> ServedFile:
        """A replica's file below a store's root; `base_path`: the model's path or Hub id, `replica`: any text."""
        return cls(Layout(root).folder("served") / f"{key_of(base_path)}.{key_of(replica)[:16]}.json")

    async def keep(self) -> NoReturn:
        """Touch the file every few seconds, so that other replicas see that this replica lives."""
        with suppress(OSError):
            await asyncio.to_thread(self.clean)
        while True:
            await asyncio.sleep(_KEEP_S)
            with suppress(OSError):
                await asyncio.to_thread(os.utime, self.path)

    def clean(self) -> None:
        """Remove files of replicas that ended long ago.

        Raises:
            OSError: the store cannot be written.
        """
        for age_s, path in self._others(f"*{'[0-9a-f]' * 64}.*"):  # earlier releases left files that begin with a dot
            if age_s > _KEPT_S:
                path.unlink(missing_ok=True)

    def _others(self, pattern: str) -> list[tuple[float, Path]]:
        """Files of other replicas, the last touched first, with the seconds since by the file system's clock."""
        # The clock of a network file system may differ from this host's, so touch and read the folder's time.
        os.utime(self.path.parent)
        now, found = self.path.parent.stat().st_mtime, []
        for path in self.path.parent.glob(pattern):
            with suppress(FileNotFoundError):
                if path != self.path:
                    found.append((now - path.stat().st_mtime, path))
        return sorted(found)

    def read(self) -> list[DesiredAdapter]:
        """The entries of `pieces`, of entries of one name the last."""
        return list({entry.name: entry for piece in self.pieces() for entry in piece}.values())

    def pieces(self) -> Iterator[list[DesiredAdapter]]:
        """The entries written last, in pieces, each of which takes a thread a few milliseconds.

        Without a file, those of all replicas that were touched within the hour, or with `prefers_living` of those that
        live; where there is none, of the replica that was touched last. Of entries of one name the last counts, which
        is of the replica that was touched last. Malformed entries and files are left out, with a warning.

        Raises:
            OSError: a file cannot be read at the moment: who took it for empty would write it so.
        """
        paths = [self.path]
        if not self.path.exists() and self.path.parent.is_dir():
            within_s = _LIVES_S if self.prefers_living else _LATELY_S
            others = self._others(f"{self.path.name.partition('.')[0]}.*json")
            paths = [path for age_s, path in others if age_s <= within_s][::-1] or [path for _, path in others[:1]]
        for path in paths:
            with suppress(FileNotFoundError):
                yield from _pieces(path)

    def write(self, served: Iterable[Fields]) -> None:
        """Have the file hold these entries: append what has changed since this process has last written, or write all.

        For a thread, with pauses for other threads.

        Raises:
            OSError: the file cannot be written; the former entries stay, perhaps with some of the changes.
        """
        now = {fields[0]: fields for fields in paced(served)}
        changed = [fields for name, fields in paced(now.items()) if self._held.get(name) != fields]
        removed = [name for name in paced(self._held) if name not in now]
        is_ours, self._changes = self._present() == self._state != (), self._changes + len(changed) + len(removed)
        if is_ours and not changed and not removed:
            return
        encode = msgspec.json.Encoder().encode
        if is_ours and self._changes <= _PIECE:
            changes = map(encode, (*itertools.starmap(DesiredAdapter, changed), *removed))
            append_small(self.path, b"\n".join((*changes, _LAST_LINE)))
        else:
            lines = [encode(adapter).decode() for adapter in itertools.starmap(DesiredAdapter, paced(now.values()))]
            lines = [*(f"{line},\n" for line in lines[:-1]), *(f"{line}\n" for line in lines[-1:])]
            replace_small(self.path, _FIRST_LINE.decode(), *lines, _LAST_LINE.decode())
            self._changes = 0
        self._held, self._state = now, self._present()

    def _present(self) -> tuple[int, ...]:
        """Which file is there: another writer's, and what a cleaner or a crash has left, has another size or inode."""
        with suppress(OSError):
            return (found := self.path.stat()).st_ino, found.st_size
        return ()


def lately_served(root: Path) -> set[str]:
    """The digests of versions that servers of the store below `root` have served within seven days."""
    found: set[str | None] = set()
    for path in Layout(root).folder("served").glob("*.json"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime <= _KEPT_S:
                for adapter in itertools.chain.from_iterable(_pieces(path)):
                    found |= {adapter.last_digest, adapter.held_digest}
    return {digest for digest in found if digest is not None}


class ServedWriter:
    """Writes what is served to a file after each change, one write at a time. For one event loop.

    Args:
        collect: returns what is served now.
    """

    def __init__(self, file: ServedFile, collect: Callable[[], Awaitable[list[Fields]]]) -> None:
        self._file, self._collect = file, collect
        self._is_written, self._is_unwritable = True, False
        self._writing: asyncio.Task[None] | None = None
        # A thread of its own: those of `to_thread` are few, and may all be fetching.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lora-plugins-served")
        self._waiting: list[asyncio.Future[None]] = []  # calls of `written`
        self._is_awaited = asyncio.Event()

    def write_soon(self) -> None:
        """Have what is served now written, at once or together with other changes of half a second."""
        self._is_written = False
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def written(self) -> None:
        """Wait until all changes so far are written, or have failed to be; a disk that hangs holds up no caller."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._is_awaited.set()
        self.write_soon()
        if not (await asyncio.wait([waiting], timeout=_WRITTEN_S))[0]:
            logger.warning("What is served is not written to %s within %.0f s", self._file.path, _WRITTEN_S)

    async def _write(self) -> None:
        """Write at once, then later changes together: one writer at a time, so that the last state wins.

        A failed write is repeated until the file holds what is served: no later change may come to ask for a write.
        """
        while not self._is_written:
            self._is_written, waiting, self._waiting = True, self._waiting, []
            self._is_awaited.clear()
            served = await self._collect()
            try:
                loop = asyncio.get_running_loop()
                least_s, busy_s = _WRITE_DELAY_S, await loop.run_in_executor(self._thread, self._write_file, served)
            except OSError as error:
                self._is_written, least_s, busy_s = False, _WRITE_AGAIN_S, 0.0
                self._note_unwritable(error)
            else:
                self._note_unwritable(None)
            for one in waiting:
                one.set_result(None)
            await asyncio.sleep(busy_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(least_s, _WRITE_PAUSE * busy_s) - busy_s):
                    await self._is_awaited.wait()

    def _write_file(self, served: Iterable[Fields]) -> float:
        """Write the served names, and return the seconds of a processor's time that the write took."""
        # Not the time on the clock: a thread that waits for the disk or for a processor takes nothing from others.
        started = time.thread_time()
        self._file.write(served)
        return time.thread_time() - started

    def _note_unwritable(self, error: OSError | None) -> None:
        """Log when writing begins to fail, and when the file is written again."""
        if error is not None and not self._is_unwritable:
            logger.warning("What is served cannot be written to %s: %s", self._file.path, error)
        elif error is None and self._is_unwritable:
            logger.info("What is served is written to %s again", self._file.path)
        self._is_unwritable = error is not None


def _pieces(path: Path) -> Iterator[list[DesiredAdapter]]:
    """The entries of a file in pieces, of which none is empty; what has changed after the last line comes last."""
    with path.open("rb") as file:
        lines = [line := file.readline()]
        if line == _FIRST_LINE:
            for line in file:
                if line == _LAST_LINE:
                    break
            changes = _entries(lines := [line, *file])
            file.seek(len(_FIRST_LINE))
            before = itertools.takewhile(_LAST_LINE.__ne__, file)
            while some := list(itertools.islice(before, _PIECE)):
                if piece := [entry for name, entry in _entries(some).items() if entry and name not in changes]:
                    yield piece
            if piece := [entry for entry in changes.values() if entry]:
                yield piece
    if lines[-1] != _LAST_LINE:
        logger.warning("What was served before cannot be read from %s, or not to its end", path)


def _entries(lines: Iterable[bytes]) -> dict[str, DesiredAdapter | None]:
    """By name; None: served no longer. Fields that another release has written besides count for nothing."""
    found: dict[str, DesiredAdapter | None] = {}
    for line in lines:
        if line != _LAST_LINE:
            try:
                entry = _LINE.decode(line.rstrip(b",\n"))
                found |= {entry: None} if isinstance(entry, str) else {entry.name: entry}
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _warn(str(error))
    return found


@lru_cache(100)  # once for each field: all entries of another release may have a field of another type
def _warn(error: str) -> None:
    logger.warning("An entry of what was served before cannot be read: %s", error)
