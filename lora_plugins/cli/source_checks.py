"""The doctor's checks of the sources of adapters; remote sources are asked for an adapter that need not be there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lora_plugins.absence import Absence, without_login
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.checks import Context, not_checked, off, on, problem, warning
from lora_plugins.cli.names import malformed
from lora_plugins.cli.output import number
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.findings import State, Step, problem_of
from lora_plugins.plugin_names import OTHERS
from lora_plugins.resolvers.sources.configured import (
    filesystem_source,
    hub_source,
    points_of_others,
    s3_source,
    sources_of_others,
)
from lora_plugins.resolvers.sources.source import ADAPTER_FILES, RemoteAdapter, Source

if TYPE_CHECKING:
    from lora_plugins.resolvers.sources.object_store import ObjectSource

_PROBE = "lora-plugins-doctor"
_MAX_ENTRIES = 20  # of the Hub's list
_MAX_FOLDERS = 10_000
_SHOWN = 3
_OF_EXT4 = "lost+found"  # root's own, at the top of a volume


def filesystem(context: Context) -> Iterator[Step]:
    """Check that the directory can be read, has adapters, and is no adapter itself."""
    filesystem_source(context.settings)
    root = context.settings.filesystem_root
    if root is None:
        yield not_checked("VLLM_LORA_RESOLVER_CACHE_DIR")
        return
    try:
        count, denied = _adapters_below(root)
    except OSError as error:
        yield problem(f"{root} cannot be read: {error.strerror}", "let the server's user read it")
        return
    is_adapter = context.at_start("filesystem")
    yield from (finding._replace(state=State.WARNING) if count else finding for finding in is_adapter)
    if denied:
        shown = ", ".join(denied[:_SHOWN]) + (f" and {len(denied) - _SHOWN} more" if len(denied) > _SHOWN else "")
        yield problem(f"this user may not read {shown}", "let the server's user read it, and run doctor as that user")
    if count:
        yield on(f"{root}: {number(count, 'adapter')} in it and its folders")
    elif not is_adapter and not denied:
        remedy = "put adapters there as <name>/ or <team>/<name>/"
        yield warning(f"{root}: no {CONFIG_FILE} in its folders or theirs", remedy)


def _adapters_below(root: Path) -> tuple[int, list[str]]:
    """Count adapters that a name can reach, two folders deep, and name what denies this user; may stop at a limit."""
    count, looked = 0, 0
    denied: list[str] = []
    for folder in [entry for entry in os.scandir(root) if entry.is_dir() and entry.name != _OF_EXT4]:
        below = [folder.path]
        with suppress(PermissionError):  # `_denied_in` names it
            below += [entry.path for entry in os.scandir(folder) if entry.is_dir()]
        for path in (path for path in below if malformed(os.path.relpath(path, root)) is None):
            not_read = _denied_in(path)
            denied += not_read
            count += not not_read and os.path.lexists(os.path.join(path, CONFIG_FILE))
        looked += len(below)
        if looked > _MAX_FOLDERS:
            break
    return count, denied


def _denied_in(folder: str) -> list[str]:
    """Return the folder, or the adapter's files in the folder, if this user may not read them."""
    if not _may(folder, os.R_OK | os.X_OK):
        return [folder]
    files = [os.path.join(folder, name) for name in ADAPTER_FILES]
    return [file for file in files if os.path.exists(file) and not _may(file, os.R_OK)]


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def s3(context: Context) -> Iterator[Step]:
    """Check that the object store answers for the template, asked for an adapter that need not be there."""
    s3_source(context.settings)
    template = context.settings.s3_path_template or ""
    shown = without_login(template)
    if "://" not in template:
        shown = f"s3://{shown} (S3_PATH_TEMPLATE without a scheme)"
    if not context.network:
        yield on(f"{shown} (not asked)")
        return
    from lora_plugins.resolvers.sources.object_store import object_source

    source = object_source(template, context.settings, locate_timeout_s=context.timeout_s)
    answer, listed = asyncio.run(_ask_and_list(source, context.timeout_s))
    if isinstance(answer, SourceUnavailable):
        finding = problem_of(answer)
        yield finding._replace(found=f"{shown}: {finding.found}")
    elif isinstance(
        answer, LoRAPluginsError
    ):  # an adapter of the probe's name, broken or not, shows that the store answers
        yield on(f"{shown} answers ({answer.found})")
    elif isinstance(listed, str):
        yield on(f"{shown} answers; its adapters were not counted: {listed}")
    elif listed:
        yield on(f"{shown} answers: {number(listed, 'adapter')}")
    else:
        remedy = "upload adapters there, or correct S3_PATH_TEMPLATE"
        yield warning(f"{shown} answers, and has no adapter", remedy)


async def _ask_and_list(
    source: ObjectSource, timeout_s: float
) -> tuple[RemoteAdapter | Absence | LoRAPluginsError, int | str]:
    """Return the answer for the probe, and the number of adapters, or why the number is unknown."""
    answer = await _ask(source, AdapterName(_PROBE), timeout_s)
    if isinstance(answer, LoRAPluginsError):
        return answer, 0
    try:
        listing = await asyncio.wait_for(source.names(""), timeout_s)
    except LoRAPluginsError as error:
        return answer, error.found
    except TimeoutError:
        return answer, f"the list takes more than {timeout_s:g} s"
    return answer, listing.gaps[0] if listing.gaps else len(listing.names)


def hub(context: Context) -> Iterator[Step]:
    """Report the Hub's answer for each entry of the list."""
    hub_source(context.settings)
    repos = context.settings.hub_repos
    if not context.network:
        yield on(f"{', '.join(repos)} (not asked)")
        return
    from huggingface_hub import constants

    from lora_plugins.resolvers.sources.hub import HubSource
    from lora_plugins.resolvers.sources.hub_repos import HubPatterns

    if constants.HF_HUB_OFFLINE:
        yield on("HF_HUB_OFFLINE is set: what the Hub's cache on this host has is served")
        return
    source = HubSource(HubPatterns.parse(repos), timeout_s=context.timeout_s)
    # A pattern is asked for a repository that need not exist: any answer of the Hub is enough.
    asked = [(entry, AdapterName.parse(entry.replace("/*", f"/{_PROBE}"))) for entry in repos[:_MAX_ENTRIES]]

    async def ask_all() -> list[RemoteAdapter | Absence | LoRAPluginsError]:
        return await asyncio.gather(*(_ask(source, name, context.timeout_s) for _, name in asked))

    for (entry, _), answer in zip(asked, asyncio.run(ask_all()), strict=True):
        if isinstance(answer, SourceUnavailable):
            yield problem_of(answer)
        elif isinstance(answer, LoRAPluginsError):
            yield warning(f"{entry}: {answer.found}", answer.remedy)
        elif not isinstance(answer, Absence):
            yield on(f"{entry} answers: an adapter at commit {answer.version[:12]}")
        elif entry.endswith("/*") or "/*@" in entry:
            yield on(f"{entry}: the Hub answers")
        else:
            yield on(f"{entry}: the Hub answers, and has no adapter at this place itself")


def others(context: Context) -> Iterator[Step]:
    """List the sources of other packages; nothing where no package has a source and `VLLM_PLUGINS` names none."""
    installed = [point.name for point in points_of_others()]
    why_off = context.why_off(OTHERS)
    if why_off:
        yield from [off(f"{why_off}: {', '.join(installed)} of other packages")] if installed else []
        return
    if not installed:
        if context.names(OTHERS):
            found = f"VLLM_PLUGINS names {OTHERS}, and no installed package has a source"
            yield warning(found, f"install one where vLLM is installed, or leave {OTHERS} out")
        return
    made = sources_of_others(context.settings)
    if made:
        yield on(f"{', '.join(source.label for source in made)} of other packages")
    else:
        yield warning(f"{', '.join(installed)} of other packages: without a setting of its own, none serves")


async def _ask(source: Source, name: AdapterName, timeout_s: float) -> RemoteAdapter | Absence | LoRAPluginsError:
    try:
        # A second more than the source's own limit: the source's error names the place, and should come first.
        return await asyncio.wait_for(source.locate(name, _PROBE), timeout_s + 1)
    except LoRAPluginsError as error:
        return error
    except TimeoutError:
        return SourceUnavailable(f"no answer within {timeout_s:g} s", remedy="check the network, or raise --timeout")
