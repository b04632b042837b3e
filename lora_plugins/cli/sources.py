"""The sources of a server with this environment, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.resolvers.sources.configured import SOURCE_PLUGINS
from lora_plugins.resolvers.sources.source import Listing, ListsNames, RemoteAdapter, Source
from lora_plugins.settings import Settings, named_in_environment

# A source's label, the name asked for, and the answer.
Report = Callable[[str, str, RemoteAdapter | Absence | LoRAPluginsError], None]


def sources_of_environment(settings: Settings, report: Report = lambda *_: None) -> list[ReportingSource]:
    """Return the sources that `VLLM_PLUGINS` names, in their order; `report` gets each answer.

    Raises:
        InvalidSettings: a source cannot be made.
    """
    found: list[ReportingSource] = []
    for plugin, configured in SOURCE_PLUGINS.items():
        if named_in_environment(plugin):
            found += (ReportingSource(source, report) for source in configured(settings))
    order = settings.sources
    # Sources that the setting leaves out come last, in the plugins' order.
    return sorted(found, key=lambda item: order.index(item.label) if item.label in order else len(order))


def require_sources(sources: Sequence[Source]) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or no named plugin has its own setting.
    """
    if not sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(SOURCE_PLUGINS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )


async def list_names(sources: Sequence[ReportingSource], base_model_name: str) -> list[Listing | LoRAPluginsError]:
    """Return each source's list, or the source's error."""

    async def one(source: ReportingSource) -> Listing | LoRAPluginsError:
        try:
            return await source.names(base_model_name)
        except LoRAPluginsError as error:
            return error

    return await asyncio.gather(*map(one, sources))


def names_of_environment(settings: Settings, base_model_name: str) -> list[str]:
    """Return all names in the sources' lists, each once.

    Raises:
        LoRAPluginsError: a source does not answer.
    """
    names: dict[str, None] = {}
    for listing in asyncio.run(list_names(sources_of_environment(settings), base_model_name)):
        if isinstance(listing, LoRAPluginsError):
            raise listing
        names.update(dict.fromkeys(listing.names))
    return list(names)


class ReportingSource:
    """A source whose answers are reported."""

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report
        self.label, self.remote, self.fetch = source.label, source.remote, source.fetch

    def __str__(self) -> str:
        return str(self._source)

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """Locate as the source does."""
        try:
            found = await self._source.locate(name, base_model_name)
        except LoRAPluginsError as error:
            self._report(self.label, str(name), error)
            raise
        self._report(self.label, str(name), found)
        return found

    async def names(self, base_model_name: str) -> Listing:
        """List as the source does, if the source can list."""
        if isinstance(self._source, ListsNames):
            return await self._source.names(base_model_name)
        return Listing((), ("this source does not list what it has",))
