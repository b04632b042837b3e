"""How full the store is, read from disk, because other servers and the command line change the store too."""

from __future__ import annotations

from dataclasses import dataclass

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.store.manifest import Manifest
from lora_plugins.store.store import Store


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The store's content; `max_bytes` is None without a budget."""

    adapters: int
    size_bytes: int
    max_bytes: int | None


class StoreUsageReader:
    """Reads a store; as the content of a digest never changes, each manifest is read once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # by digest

    def read(self, store: Store) -> StoreUsage:
        """Count the published adapters and their bytes; an adapter with an unreadable manifest is left out."""
        sizes = {}
        for digest in store.layout.digests():
            size_bytes = self._sizes.get(digest)
            if size_bytes is None:
                try:
                    size_bytes = Manifest.read(store.layout.adapter(digest)).size_bytes
                except (InvalidAdapter, SourceUnavailable):
                    continue
            sizes[digest] = size_bytes
        self._sizes = sizes
        return StoreUsage(len(sizes), sum(sizes.values()), store.max_bytes)
