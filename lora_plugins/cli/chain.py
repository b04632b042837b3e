"""The chain of sources that a server with this environment would have, told step by step, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.events import Events, Hook
from lora_plugins.resolvers.resolution import SourceChain
from lora_plugins.resolvers.sources.configured import SOURCE_PLUGINS
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.settings import BaseMatch, Settings, named_in_environment
from lora_plugins.store.opening import open_store
from lora_plugins.store.store import PartialDownload


@dataclass(frozen=True, slots=True)
class Asked:
    """What one source said of a name: where the adapter is, None for "no such adapter", or why it cannot say."""

    source: str
    located: RemoteAdapter | None
    error: LoRAPluginsError | None = None


class ToldSource:
    """A source whose answers are told on the way."""

    def __init__(self, source: Source, tell: Callable[[Asked], None]) -> None:
        self._source = source
        self._tell = tell

    @property
    def label(self) -> str:
        """The source's own."""
        return self._source.label

    @property
    def remote(self) -> bool:
        """The source's own."""
        return self._source.remote

    def __str__(self) -> str:
        return str(self._source)

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | None:
        """As the source, and tell."""
        try:
            located = await self._source.locate(name, base_model_name)
        except LoRAPluginsError as error:
            self._tell(Asked(self.label, None, error))
            raise
        self._tell(Asked(self.label, located))
        return located

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        """As the source."""
        await self._source.fetch(located, arriving)

    async def published(self, located: RemoteAdapter, directory: Path) -> None:
        """As the source."""
        await self._source.published(located, directory)


@contextmanager
def chain_of_environment(
    settings: Settings, base: BaseModel | None, *, hook: Hook, tell: Callable[[Asked], None]
) -> Iterator[SourceChain]:
    """The sources that `VLLM_PLUGINS` names, in their order, over the store of the settings.

    Without a base model, adapters are held against none.

    Raises:
        InvalidSettings: a source or the store cannot be made.
    """
    if base is None:
        settings = replace(settings, base_match=BaseMatch.OFF)
    executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="lora-plugins")
    try:
        chain = SourceChain(settings, Events(hook), open_store(settings), executor=executor)
        chain.base = base
        for plugin, configured in SOURCE_PLUGINS.items():
            make_source = configured(settings) if named_in_environment(plugin) else None
            if make_source is not None:
                chain.add(ToldSource(make_source(executor), tell))
        yield chain
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def need_sources(chain: SourceChain) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or none has its own setting.
    """
    if not chain.sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(SOURCE_PLUGINS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )
