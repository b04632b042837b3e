"""The doctor's checks of the sources of adapters: whether each answers, and how many adapters its list has.

Each check runs in the process of `doctor`, and asks the source itself, with a time limit; looking changes nothing. In:
the `Context`. Out: findings.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.checks import unless_wrong
from lora_plugins.cli.doctor_context import Check, Context, off, on, problem, some_of, warning
from lora_plugins.cli.output import number
from lora_plugins.cli.sources import list_names
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.findings import State, Step, problem_of
from lora_plugins.plugin_names import OTHERS
from lora_plugins.resolvers.sources.configured import points_of_others, sources_of
from lora_plugins.resolvers.sources.source import ADAPTER_FILES, HasProbes, Listing, Source
from lora_plugins.settings import NEEDS

_PROBE = "lora-plugins-doctor"
_MAX_PROBES = 20
_OF_EXT4 = "lost+found"  # root's own, at the top of a volume


def source(plugin: str) -> Check:
    """Return the check of one of our sources: whether the source answers, and how many adapters its list has."""

    def check(context: Context) -> Iterator[Step]:
        settings = replace(context.settings, fetch_timeout_s=context.timeout_s)
        for made in sources_of(plugin, settings):
            if made.remote and not context.network:
                yield on(f"{made} (not asked)")
                continue
            probes = _probes(made)
            errors, listing = asyncio.run(_ask(made, probes, context.timeout_s))
            silent = [error for error in errors if isinstance(error, SourceUnavailable)]
            yield from map(problem_of, silent)
            broken = [error for error in errors if error not in silent]
            yield from (warning(f"{error.adapter}: {error.found}", error.remedy) for error in broken)
            if probes and len(silent) == len(probes):
                continue
            if not isinstance(listing, LoRAPluginsError):
                yield from _of_list(made, listing, context)
            elif probes:
                yield on(f"{made} answers; its adapters were not counted: {listing.found}")
            else:
                yield problem_of(listing)

    return unless_wrong(NEEDS[plugin], check)


def _probes(source: Source) -> Sequence[AdapterName]:
    # Any answer will do, so the adapters need not exist.
    if isinstance(source, HasProbes):
        return source.probes(_PROBE)[:_MAX_PROBES]
    return [AdapterName(_PROBE)] if source.remote else []


async def _ask(
    source: Source, names: Sequence[AdapterName], timeout_s: float
) -> tuple[list[LoRAPluginsError], Listing | LoRAPluginsError]:
    """Return the errors of the names, "no such adapter" not among them, and the list of the source."""
    remedy = "check the network, or raise --timeout"

    async def error_of(name: AdapterName) -> LoRAPluginsError | None:
        try:
            # A second more than the source's own limit: the source's error names the place, and should come first.
            await asyncio.wait_for(source.locate(name, _PROBE), timeout_s + 1)
        except LoRAPluginsError as error:
            error.adapter = error.adapter or str(name)
            return error
        except TimeoutError:
            return SourceUnavailable(f"no answer within {timeout_s:g} s", remedy=remedy)
        return None

    errors = [error for error in await asyncio.gather(*map(error_of, names)) if error is not None]
    try:
        (listing,) = await asyncio.wait_for(list_names([source], ""), timeout_s)
    except TimeoutError:
        listing = Listing((), (f"the list takes more than {timeout_s:g} s",))
    return errors, listing


def _of_list(source: Source, listing: Listing, context: Context) -> Iterator[Step]:
    """Report the adapters that a source lists, and which files on this machine the user may not read."""
    names, gaps = list(listing.names), [gap for gap in listing.gaps if _OF_EXT4 not in gap]
    is_adapter: Sequence[Step] = ()
    root = context.settings.filesystem_root
    if not source.remote and root is not None:
        denied = {name: _denied_in(root / name) for name in names}
        names = [name for name in names if not denied[name]]
        is_adapter = context.at_start("filesystem")
        yield from (step._replace(state=State.WARNING) if names else step for step in is_adapter)
        if gaps := [*gaps, *(file for files in denied.values() for file in files)]:
            remedy = "let the server's user read it, and run doctor as that user"
            yield problem(f"this user may not read {some_of(gaps)}", remedy)
    if names:
        yield on(f"{source}: {number(len(names), 'adapter')}")
    elif gaps and source.remote:
        yield on(f"{source} answers; its adapters were not counted: {gaps[0]}")
    elif not gaps and not is_adapter:
        remedy = "put adapters there as <name>/ or <team>/<name>/, or correct the setting"
        yield warning(f"{source} has no adapter", remedy)


def _denied_in(folder: Path) -> list[str]:
    files = [folder / name for name in ADAPTER_FILES if (folder / name).exists()]
    is_effective = os.access in os.supports_effective_ids
    return [str(file) for file in files if not os.access(file, os.R_OK, effective_ids=is_effective)]


def others(context: Context) -> Iterator[Step]:
    """List the sources of other packages; nothing where no package has a source and `VLLM_PLUGINS` names none."""
    installed = ", ".join(point.name for point in points_of_others())
    why_off = context.why_off(OTHERS)
    if why_off:
        yield from [off(f"{why_off}: {installed} of other packages")] if installed else []
    elif not installed:
        if context.names(OTHERS):
            found = f"VLLM_PLUGINS names {OTHERS}, and no installed package has a source"
            yield warning(found, f"install one where vLLM is installed, or leave {OTHERS} out")
    elif made := sources_of(OTHERS, context.settings):
        yield on(f"{', '.join(one.label for one in made)} of other packages")
    else:
        yield warning(f"{installed} of other packages: without a setting of its own, none serves")
