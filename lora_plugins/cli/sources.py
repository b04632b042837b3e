"""The sources that a server with this environment would ask, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.events import Events, Hook
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.configured import SOURCE_PLUGINS
from lora_plugins.resolvers.sources.source import Listing, ListsNames, RemoteAdapter, Source
from lora_plugins.settings import BaseMatch, Settings, named_in_environment
from lora_plugins.store.opening import open_store


@dataclass(frozen=True, slots=True)
class Answer:
    """What one source answered for a name: where the adapter is, why there is none, or its error."""

    source: str
    found: RemoteAdapter | Absence | LoRAPluginsError


def resolver_of_environment(
    settings: Settings,
    base: BaseModel | None = None,
    *,
    hook: Hook = lambda _: None,
    report: Callable[[Answer], None] = lambda _: None,
) -> AdapterResolver:
    """A resolver with the sources that `VLLM_PLUGINS` names, in their order, over the store of the settings.

    `hook` gets the events, `report` each source's answer. Without a base model, adapters are compared with none.

    Raises:
        InvalidSettings: a source or the store cannot be made.
    """
    if base is None:
        settings = replace(settings, base_match=BaseMatch.OFF)
    resolver = AdapterResolver(settings, Events(hook), open_store(settings))
    resolver.base = base
    for source in sources_of_environment(settings, report):
        resolver.add(source)
    return resolver


def sources_of_environment(
    settings: Settings, report: Callable[[Answer], None] = lambda _: None
) -> list[ReportingSource]:
    """The sources that `VLLM_PLUGINS` names, in their order.

    Raises:
        InvalidSettings: one cannot be made.
    """
    found: list[ReportingSource] = []
    for plugin, configured in SOURCE_PLUGINS.items():
        if named_in_environment(plugin):
            found += (ReportingSource(source, report) for source in configured(settings))
    order = settings.sources
    return sorted(found, key=lambda item: order.index(item.label) if item.label in order else len(order))


async def list_names(sources: Sequence[ReportingSource], base_model_name: str) -> list[Listing | LoRAPluginsError]:
    """What each source can list, or why it does not answer."""

    async def one(source: ReportingSource) -> Listing | LoRAPluginsError:
        try:
            return await source.names(base_model_name)
        except LoRAPluginsError as error:
            return error

    return await asyncio.gather(*map(one, sources))


def names_of_environment(settings: Settings, base_model_name: str = "") -> list[str]:
    """All names that the sources can list, each once.

    Raises:
        LoRAPluginsError: of a source that does not answer.
    """
    names: dict[str, None] = {}
    for listing in asyncio.run(list_names(sources_of_environment(settings), base_model_name)):
        if isinstance(listing, LoRAPluginsError):
            raise listing
        names.update(dict.fromkeys(listing.names))
    return list(names)


def require_sources(sources: Sequence[Source]) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or none has its own setting.
    """
    if not sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(SOURCE_PLUGINS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )


class ReportingSource:
    """A source whose answers are reported."""

    def __init__(self, source: Source, report: Callable[[Answer], None]) -> None:
        self._source = source
        self._report = report
        self.label, self.remote, self.fetch = source.label, source.remote, source.fetch

    def __str__(self) -> str:
        return str(self._source)

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """As the source does."""
        try:
            found = await self._source.locate(name, base_model_name)
        except LoRAPluginsError as error:
            self._report(Answer(self.label, error))
            raise
        self._report(Answer(self.label, found))
        return found

    async def names(self, base_model_name: str) -> Listing:
        """As the source does, where it can list."""
        if isinstance(self._source, ListsNames):
            return await self._source.names(base_model_name)
        return Listing((), ("this source does not list what it has",))
