"""Ask remote sources once, within a short time, for something that need not be there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lora_plugins.absence import Absence, without_login
from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.hub_repos import HubPatterns
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.settings import Settings

_PROBE = "lora-plugins-doctor"
_MAX_ENTRIES = 20


async def reach_s3(template: str, settings: Settings, timeout_s: float) -> Finding:
    """Whether the object store answers for the template."""
    from lora_plugins.resolvers.sources.object_store import object_source

    source = object_source(template, settings, locate_timeout_s=timeout_s)
    shown = without_login(template)
    try:
        await asyncio.wait_for(source.locate(AdapterName(_PROBE), _PROBE), timeout_s + 1)
    except SourceUnavailable as error:
        return problem_of("s3", error)
    except TimeoutError:
        return _too_slow("s3", timeout_s)
    except LoRAPluginsError as error:  # there is something of this name, and that it is broken is no matter here
        return Finding("s3", State.ON, f"{shown} answers ({error.found})")
    return Finding("s3", State.ON, f"{shown} answers")


def is_offline() -> bool:
    """Whether the Hub's own setting keeps its client from asking."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


async def reach_hub(entries: Sequence[str], timeout_s: float) -> list[Finding]:
    """What the Hub answers for each entry of the list."""
    from lora_plugins.resolvers.sources.hub import HubSource

    source = HubSource(HubPatterns.parse(entries), timeout_s=timeout_s)
    return await asyncio.gather(*(_reach_entry(source, entry, timeout_s) for entry in entries[:_MAX_ENTRIES]))


async def _reach_entry(source: Source, entry: str, timeout_s: float) -> Finding:
    whole_owner = entry.endswith("/*") or "/*@" in entry
    name = AdapterName.parse(entry.replace("/*", f"/{_PROBE}"))
    try:
        located = await asyncio.wait_for(source.locate(name, _PROBE), timeout_s + 1)
    except SourceUnavailable as error:
        return problem_of("hub", error)
    except TimeoutError:
        return _too_slow("hub", timeout_s)
    except LoRAPluginsError as error:
        return Finding("hub", State.WARNING, f"{entry}: {error.found}", error.remedy)
    if not isinstance(located, Absence):
        return Finding("hub", State.ON, f"{entry} answers: an adapter at commit {located.version[:12]}")
    if whole_owner:
        return Finding("hub", State.ON, f"{entry}: the Hub answers")
    return Finding("hub", State.ON, f"{entry}: the Hub answers, and has no adapter at this place itself")


def _too_slow(check: str, timeout_s: float) -> Finding:
    return Finding(check, State.PROBLEM, f"no answer within {timeout_s:g} s", "check the network, or raise --timeout")
