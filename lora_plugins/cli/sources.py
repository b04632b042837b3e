"""The sources that a server with this environment would ask, without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.events import Events, Hook
from lora_plugins.resolvers.resolution import AdapterResolver
from lora_plugins.resolvers.sources.configured import SOURCE_PLUGINS
from lora_plugins.resolvers.sources.source import RemoteAdapter, Source
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
    for plugin, configured in SOURCE_PLUGINS.items():
        source = configured(settings) if named_in_environment(plugin) else None
        if source is not None:
            resolver.add(_Reporting(source, report))
    return resolver


def require_sources(resolver: AdapterResolver) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or none has its own setting.
    """
    if not resolver.sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(SOURCE_PLUGINS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )


class _Reporting:
    """A source whose answers are reported."""

    def __init__(self, source: Source, report: Callable[[Answer], None]) -> None:
        self._source = source
        self._report = report
        self.label, self.remote, self.fetch = source.label, source.remote, source.fetch

    def __str__(self) -> str:
        return str(self._source)

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """As the source does, and with what lies around where it has none: nobody waits for this but a person."""
        try:
            found = await self._source.locate(name, base_model_name)
        except LoRAPluginsError as error:
            self._report(Answer(self.label, error))
            raise
        if isinstance(found, Absence):
            found = await self._source.look_around(name, base_model_name, found)
        self._report(Answer(self.label, found))
        return found

    async def look_around(self, name: AdapterName, base_model_name: str, absence: Absence) -> Absence:  # noqa: ARG002
        """The absence as it is: `locate` has looked."""
        return absence
