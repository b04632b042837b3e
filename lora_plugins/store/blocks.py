"""Which names are refused until they are loaded again: one small file for each, so all servers of a store see it.

A block is of a name with every revision and digest: that of `sql` is one of `sql@main` too. To ask is to look whether a
file is there, without a lock or a copy of what was there before: what another server has blocked is refused from the
next request on, on a network file system as soon as its cache of names lets it be seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from lora_plugins.errors import AdapterNotFound
from lora_plugins.store.layout import Layout, replace_small, sync_directory


def blocked(name: str) -> AdapterNotFound:
    """What to raise where a name is asked for that was unloaded and blocked, by itself or without its revision."""
    return AdapterNotFound(
        "a name that was unloaded and blocked",
        expected="one that is served",
        remedy=f"load '{name.partition('@')[0]}' again with POST /v1/loras",
        adapter=name,
    )


class Blocks:
    """The blocked names of all servers that share a store; those of this process hold while the store is away too."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.folder("blocked")
        self._locks = layout.folder("locks")
        self._unwritten: dict[str, str] = {}  # what is to stand in the file of a name
        self._written: set[str] = set()  # by this process

    def __contains__(self, text: str) -> bool:
        """Whether a name is blocked, by itself or without its revision."""
        return any(self._is_blocked(name) for name in {text.partition("@")[0], text})

    def refuse(self, text: str, *, but_itself: bool = False) -> None:
        """What every way to a name asks: requests, loads, and changes of what is served.

        `but_itself`: for an operator's load of just this name, which ends its own block, and none of all revisions.

        Raises:
            AdapterNotFound: it is blocked.
        """
        path, at, _ = text.partition("@")
        if (at and self._is_blocked(path)) if but_itself else text in self:
            raise blocked(text)

    def names(self) -> set[str]:
        """The names that were blocked, as they were."""
        return {*self._unwritten, *self._read()}

    def among(self, texts: Iterable[str]) -> set[str]:
        """Which of these names are blocked, after one look at the folder: for lists of many."""
        names = self.names()
        return {text for text in texts if text in names or text.partition("@")[0] in names} if names else set()

    def hold(self, name: str) -> None:
        """Refuse a name in this process from here on; `write` has the others do so, and the next ones."""
        self._unwritten[name] = json.dumps({"name": name, "id": os.urandom(8).hex()})

    def write(self, name: str) -> None:
        """Have the block that `hold` has begun be on disk, power cuts included.

        Raises:
            OSError: it cannot be; it holds in this process only.
        """
        with self._guard():
            text = self._unwritten.get(name)
            if text is None:
                return  # lifted meanwhile
            replace_small(self._file(name), text)
            sync_directory(self._folder)
            self._written.add(name)
            if self._unwritten[name] == text:
                del self._unwritten[name]

    def present(self, name: str) -> str | None:
        """What marks the block of just this name, unlike any before or after it; None where there is none."""
        text = self._unwritten.get(name)
        if text is None:
            try:
                text = self._file(name).read_text()
            except OSError:
                text = "unread" if self._is_blocked(name) else None
        return text

    def lift(self, name: str, seen: str | None) -> bool:
        """End the block that `present` has marked so; False where the name was blocked again since, and is so still.

        Raises:
            OSError: it cannot be ended.
        """
        if seen is None:
            return self.present(name) is None
        with self._guard():
            if self.present(name) not in (seen, None):
                return False
            self._file(name).unlink(missing_ok=True)
            sync_directory(self._folder)
            self._unwritten.pop(name, None)
            self._written.discard(name)
            return True

    def _is_blocked(self, name: str) -> bool:
        if name in self._unwritten or os.path.exists(self._file(name)):
            return True
        return name in self._written and not self._folder.is_dir()  # the store is away, and the block with it

    def _read(self) -> Iterator[str]:
        try:
            entries = [entry.path for entry in os.scandir(self._folder) if entry.name.endswith(".json")]
        except OSError:
            entries = []
        for path in entries:
            try:
                yield str(json.loads(Path(path).read_text())["name"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # lifted at this moment; or none of ours, which blocks no name that can be told

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    def _guard(self) -> FileLock:
        """Held for moments: nobody ends a block that another server makes at this moment.

        Raises:
            FileNotFoundError: the store is not there.
        """
        self._locks.stat()  # FileLock would make it, in the place of a store that is away
        return FileLock(self._locks / "blocks.guard", timeout=30)
