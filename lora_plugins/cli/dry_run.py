"""`resolve --dry-run`: ask the sources, say what a fetch would bring, and leave the store as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import SourceUnavailable, describing
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.resolvers.versions import select_files
from lora_plugins.settings import Settings
from lora_plugins.store.layout import Layout, is_digest, key_of


@dataclass(frozen=True, slots=True)
class WouldFetch:
    """An adapter that a source has: what of it would be fetched, and its directory if the store has it already."""

    adapter: RemoteAdapter
    size_bytes: int
    stored: Path | None

    def as_json(self) -> dict[str, Any]:
        """The fields of `located`."""
        return {
            "source": self.adapter.source,
            "uri": self.adapter.uri,
            "version": self.adapter.version,
            "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in self.adapter.files],
            "size_bytes": self.size_bytes,
            "stored": None if self.stored is None else str(self.stored),
        }


async def locate(sources: Sequence[Source], name: AdapterName, base_path: str, settings: Settings) -> WouldFetch | None:
    """What the first source that has the name would bring; None where every source says that it has none.

    Raises:
        LoRAPluginsError: as a server's resolver does; a source that is unavailable hides no later one.
    """
    unavailable: SourceUnavailable | None = None
    for source in sources:
        with describing(adapter=str(name)):
            try:
                found = await source.locate(name, base_path)
            except SourceUnavailable as error:
                unavailable = unavailable or error
                continue
            if isinstance(found, RemoteAdapter):
                selected = select_files(found, settings)
                size_bytes = sum(file.size_bytes for file in selected.files)
                return WouldFetch(selected, size_bytes, _stored(settings, selected))
    if unavailable is not None:
        unavailable.adapter = unavailable.adapter or str(name)
        raise unavailable
    return None


def _stored(settings: Settings, adapter: RemoteAdapter) -> Path | None:
    layout = Layout(settings.store_dir)
    try:
        digest = (layout.folder("index") / key_of(adapter.uri, adapter.version)).read_text(errors="replace")
    except OSError:
        return None
    return layout.adapter(digest) if is_digest(digest) and layout.adapter(digest).is_dir() else None
