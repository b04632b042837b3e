"""The sources that a server with this environment would ask, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.events import Events, Hook
from lora_plugins.resolvers.resolution import SourceChain
from lora_plugins.resolvers.sources.configured import SOURCE_PLUGINS
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
from lora_plugins.resolvers.sources.uri import AtUri
from lora_plugins.settings import BaseMatch, Settings, named_in_environment
from lora_plugins.store.opening import open_store


@dataclass(frozen=True, slots=True)
class Answer:
    """What one source answered for a name: where the adapter is, None for "no such adapter", or its error."""

    source: str
    located: RemoteAdapter | None
    error: LoRAPluginsError | None = None


@contextmanager
def sources_of_environment(
    settings: Settings,
    base: BaseModel | None = None,
    *,
    hook: Hook = lambda _: None,
    report: Callable[[Answer], None] = lambda _: None,
) -> Iterator[SourceChain]:
    """The sources that `VLLM_PLUGINS` names, in their order, over the store of the settings.

    `hook` gets the events, `report` each source's answer. Without a base model, adapters are compared with none.

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
                chain.add(_reporting(make_source(executor), report))
        yield chain
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def require_sources(chain: SourceChain) -> None:
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


def _reporting(source: Source, report: Callable[[Answer], None]) -> Source:
    async def locate(name: AdapterName, base_model_name: str) -> RemoteAdapter | None:
        try:
            located = await source.locate(name, base_model_name)
        except LoRAPluginsError as error:
            report(Answer(source.label, None, error))
            raise
        report(Answer(source.label, located))
        return located

    return AtUri(source, locate)
