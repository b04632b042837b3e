"""The sources of adapters that this environment names, as a server with the same variables would ask them.

Runs in the process of `pull`, `why`, `ls --remote` and `doctor`, without a server. In: the settings and `VLLM_PLUGINS`.
Out: the sources in their order, and the names that they list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.plugin_names import RESOLVERS
from lora_plugins.resolvers.sources.configured import sources_of
from lora_plugins.resolvers.sources.source import Listing, ListsNames, Source, place_in_order
from lora_plugins.settings import Settings, named_in_environment


def sources_of_environment(settings: Settings) -> list[Source]:
    """Return the sources that `VLLM_PLUGINS` names, in their order.

    Raises:
        InvalidSettings: a source cannot be made.
    """
    named = filter(named_in_environment, RESOLVERS)
    found = [source for plugin in named for source in sources_of(plugin, settings)]
    return sorted(found, key=lambda item: place_in_order(item, settings.sources))


def require_sources(sources: Sequence[Source]) -> None:
    """Refuse to go on where a server with this environment would ask no source.

    Raises:
        InvalidSettings: no plugin with a source is named, or no named plugin has its own setting.
    """
    if not sources:
        raise InvalidSettings(
            "no source of adapters in this environment",
            expected="VLLM_PLUGINS with one of " + ", ".join(RESOLVERS) + ", and that one's own setting",
            remedy="set both; 'lora-plugins doctor' says what is missing",
        )


async def list_names(sources: Sequence[Source], base_model_name: str) -> list[Listing | LoRAPluginsError]:
    """Return each source's list, or the source's error."""

    async def one(source: Source) -> Listing | LoRAPluginsError:
        if not isinstance(source, ListsNames):
            return Listing((), ("this source does not list what it has",))
        try:
            return await source.names(base_model_name)
        except LoRAPluginsError as error:
            return error

    return await asyncio.gather(*map(one, sources))


def names_of_environment(settings: Settings, base_model_name: str, *, only_local: bool = False) -> list[str]:
    """Return all names in the sources' lists, each once; `only_local`: of sources on this machine.

    Raises:
        LoRAPluginsError: a source does not answer.
    """
    names: dict[str, None] = {}
    sources = [source for source in sources_of_environment(settings) if not (only_local and source.remote)]
    for listing in asyncio.run(list_names(sources, base_model_name)):
        if isinstance(listing, LoRAPluginsError):
            raise listing
        names.update(dict.fromkeys(listing.names))
    return list(names)
