"""The served file: the names that a server serves, kept in its store, so that the next server serves them at once.

The leading API server reads the file at its start (`reconciler.py`), has `served_writer.py` write the file after each
change, and touches the file every few seconds. Reads and writes run in threads, because the disk may hang. Replicas
that share a store have a file each. A replica without a file, such as a new pod of a Deployment, begins with the names
of all replicas that live or have ended within the hour.

The file is JSON with one entry on each line, so that 100,000 entries are read in pieces. After the closing bracket come
the changes since the whole file was written: an entry is new or changed, and a plain text is a name that is served no
longer. Each write ends with the closing bracket again, so that a reader sees a write that was cut.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable, Iterator
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
_FIRST_LINE = f'{{"format": {FORMAT}, "served": [\n'.encode()
_LAST_LINE = b"]}\n"
_LINE = msgspec.json.Decoder[DesiredAdapter | str](DesiredAdapter | str)  # an entry, or a name served no longer
# Entries read at a time, in a few milliseconds; after more changes than these, the whole file is written again.
_PIECE = 500
_TOUCH_S = 5.0
_LIVES_S = 20.0  # since the last touch: a replica that has not touched its file for longer has ended
_LATELY_S = 3600.0  # since the last touch: a replica without a file of its own begins with these files' names
_KEPT_S = 7 * 86400.0  # since the last touch: older files are removed
# The fields of a `DesiredAdapter`, in order. Tuples of strings, because garbage collections do not visit them; visits
# to 100,000 objects would stop the event loop for 20 ms.
Fields = tuple[str, *tuple[str | bool | None, ...]]


class ServedFile:
    """The file of one replica and base model.

    Attributes:
        prefers_living: whether a replica without a file begins with the names of living replicas only, if any lives.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.prefers_living = path, False
        self._written: dict[str, Fields] = {}  # the entries after this process's last write, by name
        # `_present()` after this process's last write; None before any write. Another writer leaves another state.
        self._state: tuple[int, ...] | None = None
        self._change_count = 0  # changes behind the first closing bracket

    @classmethod
    def of_store(cls, root: Path, base_path: str, replica: str) -> ServedFile:
        """A replica's file below a store's root.

        `base_path` is the base model's path or Hub id; `replica` is any text that no other replica has.
        """
        return cls(Layout(root).folder("served") / f"{key_of(base_path)}.{key_of(replica)[:16]}.json")

    async def keep(self) -> NoReturn:
        """Touch the file every few seconds, so that other replicas see that this replica lives."""
        with suppress(OSError):
            await asyncio.to_thread(self.clean)
        while True:
            await asyncio.sleep(_TOUCH_S)
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
        """Files of other replicas, the last touched first, each after the seconds since its last touch.

        Seconds of the file system's clock.
        """
        # The clock of a network file system may differ from this host's, so touch and read the folder's time.
        os.utime(self.path.parent)
        now, found = self.path.parent.stat().st_mtime, []
        for path in self.path.parent.glob(pattern):
            with suppress(FileNotFoundError):
                if path != self.path:
                    found.append((now - path.stat().st_mtime, path))
        return sorted(found)

    def read(self) -> list[DesiredAdapter]:
        """The entries of `pieces` in one list, with one entry for each name: the last."""
        return list({entry.name: entry for piece in self.pieces() for entry in piece}.values())

    def pieces(self) -> Iterator[list[DesiredAdapter]]:
        """The entries written last, in pieces, each of which takes a thread a few milliseconds.

        Where this replica has no file, the entries are of all files that were touched within the hour, or with
        `prefers_living` within the last 20 s; where no file was, of the file that was touched last. Files come in the
        order of their last touch, so of several entries of one name the last counts. Malformed entries and files are
        left out, with a warning.

        Raises:
            OSError: a file cannot be read at the moment. The caller must not go on as if the file were empty, or the
                next write would lose the entries.
        """
        paths = [self.path]
        if not self.path.exists() and self.path.parent.is_dir():
            within_s = _LIVES_S if self.prefers_living else _LATELY_S
            others = self._others(f"{self.path.name.partition('.')[0]}.*json")
            # Reversed: the last touched file comes last. Without any recent file, the most recent of the old files.
            paths = [path for age_s, path in others if age_s <= within_s][::-1] or [path for _, path in others[:1]]
        for path in paths:
            with suppress(FileNotFoundError):
                yield from _pieces(path)

    def write(self, served: Iterable[Fields]) -> None:
        """Have the file hold these entries: append the changes since this process's last write, or write all entries.

        Runs in a thread, and pauses so that other threads can run.

        Raises:
            OSError: the file cannot be written; the former entries stay, perhaps with some of the changes.
        """
        now = {fields[0]: fields for fields in paced(served)}
        changed = [fields for name, fields in paced(now.items()) if self._written.get(name) != fields]
        removed = [name for name in paced(self._written) if name not in now]
        # The file is there, and nobody else has changed it since this process's last write.
        is_as_written = self._present() == self._state != ()
        if is_as_written and not changed and not removed:
            return
        encode = msgspec.json.Encoder().encode
        self._change_count += len(changed) + len(removed)
        if is_as_written and self._change_count <= _PIECE:
            changes = map(encode, (*itertools.starmap(DesiredAdapter, changed), *removed))
            append_small(self.path, b"\n".join((*changes, _LAST_LINE)))
        else:
            lines = [f"{encode(it).decode()},\n" for it in itertools.starmap(DesiredAdapter, paced(now.values()))]
            lines[-1:] = [line.replace(",\n", "\n") for line in lines[-1:]]  # JSON allows no comma after the last
            replace_small(self.path, _FIRST_LINE.decode(), *lines, _LAST_LINE.decode())
            self._change_count = 0
        self._written, self._state = now, self._present()

    def _present(self) -> tuple[int, ...]:
        """The inode and size of the file; empty without a file.

        Another replica's write, a removal and a cut write each change inode or size.
        """
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


def _pieces(path: Path) -> Iterator[list[DesiredAdapter]]:
    """The entries of a file in pieces, none of them empty; the changes behind the closing bracket come last.

    An entry that a later change replaces or removes is left out.
    """
    with path.open("rb") as file:
        # Read the changes first, then the entries from the second line on again, without those that have changed.
        lines = [line := file.readline()]  # and, where the file is ours, what stands behind the closing bracket
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
    """The entries in lines, by name; None for a name served no longer. Fields of other releases are ignored."""
    found: dict[str, DesiredAdapter | None] = {}
    for line in lines:
        if line != _LAST_LINE:
            try:
                entry = _LINE.decode(line.rstrip(b",\n"))
                found |= {entry: None} if isinstance(entry, str) else {entry.name: entry}
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _warn(str(error))
    return found


# One warning for each text: all entries of another release may have a field of another type.
@lru_cache(100)
def _warn(error: str) -> None:
    logger.warning("An entry of what was served before cannot be read: %s", error)
