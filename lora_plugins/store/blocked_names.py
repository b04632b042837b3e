"""Names that every server of a store refuses until an operator loads the name again: one small file for each name.

Runs in every API server of the store, and in commands: requests, loads and changes of served adapters ask first.

A block of a name covers every revision and digest, and every mixture with the name: a block of `sql` covers `sql@main`
and `sql*0.5`. A question looks whether a file exists, without a lock or a cache: servers refuse a name that another
server has blocked from their next request on, on a network file system as soon as the cache of names there has expired.

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
    """The error for a request of a name that is blocked, because the name `by` is."""
    return AdapterNotFound(
        "a name that was unloaded and blocked",
        expected="one that is served",
        remedy=f"load '{by or name.partition('@')[0]}' again with POST /v1/loras",
        adapter=name,
    )


class Blocks:
    """The blocked names of all servers that share a store; blocks seen by this process hold while the store is away."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.folder("blocked")
        self._locks = layout.folder("locks")
        self._unwritten: dict[str, str] = {}  # content of the file of each name that is not on disk yet
        self._seen: set[str] = set()  # names whose file this process has written or found
        self._names: dict[str, str] = {}  # of the files listed last: a file's name is made of the name

    def __contains__(self, text: str) -> bool:
        """Whether a name is known to be blocked, by itself or without its revision; never raises."""
        with suppress(OSError):
            return any(self._is_blocked(name) for name in covering(text))
        return False

    def refuse(self, text: str, *, but_itself: bool = False) -> None:
        """Raise for a blocked name; requests, loads, and changes of served adapters call `refuse` first.

        `but_itself`: an operator's load of exactly `text`, which ends the block of `text` but none of all revisions.

        Raises:
            AdapterNotFound: the name is blocked.
            SourceUnavailable: the store cannot be asked.
        """
        # A load of `sql@main` does not lift the block of `sql`, so only the block of the bare path refuses the load.
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
        """Refuse a name in this process from here on; `write` makes the block durable and visible to other servers."""
        self._unwritten[name] = json.dumps({"name": name, "id": os.urandom(8).hex()})

    def write(self, name: str) -> None:
        """Write the block that `hold` has begun to disk, so that the block survives a power cut.

        Raises:
            OSError: the file cannot be written; the block holds in this process only.
        """
        with self._guard():
            text = self._unwritten.get(name)
            if text is None:
                return  # lifted meanwhile
            replace_small(self._file(name), text)
            self._seen.add(name)
            # `hold` may have blocked the name again during the write; the newer block is then still to be written.
            if self._unwritten[name] == text:
                del self._unwritten[name]

    def present(self, name: str) -> str | None:
        """The content of the block of exactly this name, unlike any earlier or later block; None without a block.

        Raises:
            SourceUnavailable: the store cannot be asked.
        """
        text = self._unwritten.get(name)
        if text is None:
            try:
                text = self._file(name).read_text()
            except OSError:
                # An unreadable file must not read as "no block": a load would then serve a refused name.
                with store_errors():
                    text = "unread" if self._is_blocked(name) else None
        return text

    def lift(self, name: str, seen: str | None) -> bool:
        """End the block with the content `seen`; False where somebody has blocked the name again since.

        Raises:
            OSError: the file cannot be removed.
        """
        if seen is None:
            return self.present(name) is None
        with self._guard():
            if self.present(name) not in (seen, None):
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
            if name in self._seen and os.path.isdir(self._folder):
                self._seen.discard(name)  # lifted by another server; otherwise the store is away, and the block with it
            return name in self._seen
        self._seen.add(name)
        return True

    def _read(self) -> set[str]:
        try:
            files = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")]
        except OSError:
            files = []
        # Each file is read once: requests ask in the event loop, and tenants may have blocked thousands of names.
        found = {file: self._names.get(file) or self._name_in(file) for file in files}
        self._names = {file: name for file, name in found.items() if name is not None}
        return set(self._names.values())

    def _name_in(self, file: str) -> str | None:
        try:
            return str(json.loads((self._folder / file).read_text())["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # lifted at this moment, or a foreign file without a name

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    def _guard(self) -> FileLock:
        """The lock of all changes of blocks, held for moments: `lift` must not remove the block of another server.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self._locks.stat()  # FileLock would make the folder in the place of a store that is away
        return FileLock(self._locks / "blocks.guard", timeout=30)
