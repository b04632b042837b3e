"""What `ls`, `verify`, `gc` and `inspect` see of the store; nothing is written by looking."""

from __future__ import annotations

import functools
from typing import Any

from lora_plugins.cli.exits import UsageProblem
from lora_plugins.errors import AdapterNotFound, InvalidSettings
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import Entry, entries
from lora_plugins.store.layout import MIN_PREFIX, Layout, is_prefix
from lora_plugins.store.leases import Leases
from lora_plugins.store.opening import open_store
from lora_plugins.store.processes import Processes
from lora_plugins.store.store import Store

SHOWN_CHARACTERS = 12  # of a digest


class StoreView:
    """The store of the settings, which need not be there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.layout = Layout(settings.store_dir)
        self.leases = Leases(self.layout, Processes(self.layout.folder("processes")))

    @functools.cached_property
    def store(self) -> Store:
        """The store itself, to change it; made where it is not there.

        Raises:
            InvalidSettings: it cannot be written.
        """
        return open_store(self._settings)

    def entries(self) -> list[Entry]:
        """What is published, the one used longest ago first; nothing where the store has never been made.

        Raises:
            InvalidSettings: the store cannot be read.
        """
        root = self.layout.root
        if not root.exists():
            return []
        try:
            return entries(self.layout)
        except OSError as error:
            raise InvalidSettings(
                f"a store below {root} that answers '{error.strerror or type(error).__name__}'",
                expected="a directory that can be read",
                remedy="set LORA_PLUGINS_STORE_DIR, or run as the server's user",
            ) from error

    def row(self, entry: Entry) -> dict[str, Any]:
        """One adapter as JSON has it."""
        manifest = entry.manifest
        return {
            "digest": entry.digest,
            "uri": manifest.uri if manifest else None,
            "version": manifest.version if manifest else None,
            "size_bytes": entry.size_bytes,
            "fetched_at": manifest.fetched_at if manifest else None,
            "used_at": entry.used_at or None,
            "leases": len(self.leases.holders(entry.digest)),
            "damaged": manifest is None or (self.layout.folder("damaged") / entry.digest).exists(),
            "path": str(self.layout.adapter(entry.digest)),
        }

    def find_digest(self, prefix: str) -> str:
        """The one published adapter whose digest begins so.

        Raises:
            AdapterNotFound: there is none.
            UsageProblem: there are several, or this cannot be the beginning of a digest.
        """
        if not is_prefix(prefix):
            raise UsageProblem(f"'{prefix}' is no digest: {MIN_PREFIX} to 64 of 0-9 and a-f")
        found = [entry.digest for entry in self.entries() if entry.digest.startswith(prefix)]
        if not found:
            raise AdapterNotFound(
                "no such adapter in the store",
                expected=f"a digest in {self.layout.root} that begins with {prefix}",
                remedy="'lora-plugins ls' shows what is there",
            )
        if len(found) > 1:
            raise UsageProblem(f"'{prefix}' is the beginning of {len(found)} digests; give more of it")
        return found[0]
