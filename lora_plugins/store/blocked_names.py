"""Names that every server of a store refuses until an operator loads the name again: one small file for each name.

Runs in every API server of the store, and in commands: requests, loads and changes of served adapters ask first.

A block of a name covers every revision and digest of the adapter, and every mixture (a weighted sum of adapters) with
the name: a block of `sql` covers `sql@main` and `sql*0.5`. Each question looks whether the file exists, without a lock
or a cache. So when one server has blocked a name, the next request to any other server is refused too; on a network
file system, once the client's cache of file names has expired.

Only a missing file means "not blocked". A file system that answers otherwise (EACCES, EIO, ESTALE) leaves the question
open: requests and loads are then refused as a fault, and nothing is unloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from lora_plugins.adapter.names import covering
from lora_plugins.errors import AdapterNotFound
from lora_plugins.store.disk_errors import store_errors
from lora_plugins.store.durable_files import sync_directory
from lora_plugins.store.layout import Layout, replace_small


def blocked(name: str, by: str = "") -> AdapterNotFound:
    """The error for a request of `name`, which the block of `by` covers; `by` empty: of `name` without its revision."""
    return AdapterNotFound(
        "a name that was unloaded and blocked",
        expected="one that is served",
        remedy=f"load '{by or name.partition('@')[0]}' again with POST /v1/loras",
        adapter=name,
    )


class Blocks:
    """The blocked names of all servers that share a store.

    While the store is away (such as a lost mount), the blocks that this process has seen stay in force.
    """

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.folder("blocked")
        self._locks = layout.folder("locks")
        self._unwritten: dict[str, str] = {}  # by blocked name, the content of a file that is not on disk yet
        self._seen: set[str] = set()  # names whose file this process has written or found
        self._names: dict[str, str] = {}  # by file name, the blocked name in the file, for the files listed last

    def __contains__(self, text: str) -> bool:
        """Whether a block covers a name; False, too, where the store cannot be asked. Never raises."""
        with suppress(OSError):
            return any(self._is_blocked(name) for name in covering(text))
        return False

    def refuse(self, text: str, *, but_itself: bool = False) -> None:
        """Raise for a blocked name; requests, loads, and changes of served adapters call `refuse` first.

        With `but_itself`, a block of exactly `text` does not count: an operator's load of `text` ends this block.

        Raises:
            AdapterNotFound: the name is blocked.
            SourceUnavailable: the store cannot be asked.
        """
        # A load of `sql@main` lifts the block of `sql@main` but not the block of `sql`, which then refuses the load.
        names = covering(text) - ({text} if but_itself else set())
        with store_errors():
            if (name := next(filter(self._is_blocked, sorted(names)), None)) is not None:
                raise blocked(text, name)

    def names(self) -> set[str]:
        """The blocked names, as operators wrote the names."""
        self._seen |= (read := self._read())
        return {*self._unwritten, *read}

    def among(self, texts: Iterable[str]) -> set[str]:
        """The blocked names among `texts`, after one listing of the folder: cheaper than a question for each name."""
        names = self.names()
        return {text for text in texts if not covering(text).isdisjoint(names)} if names else set()

    def hold(self, name: str) -> None:
        """Refuse a name in this process from here on; `write` makes the block durable and visible to other servers.

        By the random `id` in the content, this block differs from any other block of the name (see `lift`).
        """
        self._unwritten[name] = json.dumps({"name": name, "id": os.urandom(8).hex()})

    def write(self, name: str) -> None:
        """Write the block that `hold` has begun to disk, so that the block survives a power cut.

        Raises:
            OSError: the file cannot be written; the block holds in this process only.
        """
        with self._guard():
            text = self._unwritten.get(name)
            if text is None:
                return  # somebody has lifted the block meanwhile
            replace_small(self._file(name), text)
            self._seen.add(name)
            # `hold` may have blocked the name again during the write; the newer block is then still to be written.
            if self._unwritten[name] == text:
                del self._unwritten[name]

    def present(self, name: str) -> str | None:
        """The content of the block of exactly this name; None without a block. Each block has a content of its own.

        Raises:
            SourceUnavailable: the store cannot be asked.
        """
        text = self._unwritten.get(name)
        if text is None:
            try:
                text = self._file(name).read_text()
            except OSError:
                # An unreadable file must not count as "no block": a load would then serve a refused name. Any text
                # will do in the place of the content.
                with store_errors():
                    text = "unread" if self._is_blocked(name) else None
        return text

    def lift(self, name: str, seen: str | None) -> bool:
        """End the block with the content `seen`, of an earlier `present`; False where the name is blocked again since.

        Where `seen` is None, the caller saw no block, and nothing is removed.

        Raises:
            OSError: the file cannot be removed.
        """
        if seen is None:
            return self.present(name) is None
        with self._guard():
            if self.present(name) not in (seen, None):  # None: another server has lifted the block meanwhile
                return False
            self._file(name).unlink(missing_ok=True)
            sync_directory(self._folder)
            self._unwritten.pop(name, None)
            self._seen.discard(name)
            return True

    def _is_blocked(self, name: str) -> bool:
        """Whether the block of exactly this name is there; raises OSError where the store cannot be asked."""
        if name in self._unwritten:
            return True
        try:
            os.stat(self._file(name))
        except FileNotFoundError:
            # With the folder there, another server has lifted the block. Without the folder, the store is away, and a
            # block that this process has seen stays in force.
            if name in self._seen and os.path.isdir(self._folder):
                self._seen.discard(name)
            return name in self._seen
        self._seen.add(name)
        return True

    def _read(self) -> set[str]:
        """The blocked names on disk; none where the folder cannot be listed."""
        try:
            files = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")]
        except OSError:
            files = []
        # Read only files that the last listing did not have: requests ask in the event loop, and there may be thousands
        # of blocked names.
        found = {file: self._names.get(file) or self._name_in(file) for file in files}
        self._names = {file: name for file, name in found.items() if name is not None}
        return set(self._names.values())

    def _name_in(self, file: str) -> str | None:
        try:
            return str(json.loads((self._folder / file).read_text())["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # the block was lifted at this moment, or the file is not ours and has no name

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    def _guard(self) -> FileLock:
        """The lock for all changes of blocks, held for moments: `lift` must not remove a block just written elsewhere.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self._locks.stat()  # FileLock would make the folder in the place of a store that is away
        return FileLock(self._locks / "blocks.guard", timeout=30)
