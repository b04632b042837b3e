"""Each plugin of ours: on or off, and why."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.absence import without_login
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.cli.amounts import number
from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.cli.doctor.installation import is_cpu_build, is_ours, missing_entry_point
from lora_plugins.cli.doctor.reach import is_offline, reach_hub, reach_s3
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.kernels import dispatch
from lora_plugins.kernels.compiled import build
from lora_plugins.plugin_names import ADMIN, FILESYSTEM, HUB, KERNELS, MANAGER, S3
from lora_plugins.resolvers.sources.configured import filesystem_source, hub_source, s3_source
from lora_plugins.settings import Settings, named_in_environment

_MAX_FOLDERS = 10_000
_OF_MANAGER = (
    "LORA_PLUGINS_HOST_MAX_BYTES",
    "LORA_PLUGINS_HOST_POLICY",
    "LORA_PLUGINS_UNMATCHED",
)
_OF_KERNELS = ("LORA_PLUGINS_KERNELS",)
_OF_ADMIN = (
    "LORA_PLUGINS_ADAPTERS_FILE",
    "LORA_PLUGINS_PRELOAD",
    "LORA_PLUGINS_RESTORE",
    "LORA_PLUGINS_REFRESH_S",
    "LORA_PLUGINS_DRAIN_TIMEOUT_S",
    "LORA_PLUGINS_POLICY",
)


@dataclass(frozen=True, slots=True)
class Context:
    """What the checks use.

    Attributes:
        env: the environment. settings: what is right of it. discovered: plugins that vLLM would find, by name.
        network: whether remote sources are asked. timeout_s: for how long.
    """

    env: Mapping[str, str]
    settings: Settings
    discovered: Mapping[str, list[str]]
    network: bool
    timeout_s: float

    def why_off(self, plugin: str) -> str:
        """Why a plugin does not run, or nothing where it does."""
        if "VLLM_PLUGINS" not in self.env:
            return "VLLM_PLUGINS is unset"
        return "" if named_in_environment(plugin, self.env) else "VLLM_PLUGINS does not name it"


def check_plugins(context: Context) -> Iterator[Finding]:
    """A verdict, or several, on each plugin."""
    yield from _check_source(context, "filesystem", FILESYSTEM, "VLLM_LORA_RESOLVER_CACHE_DIR", _filesystem)
    yield from _check_source(context, "s3", S3, "S3_PATH_TEMPLATE", _s3)
    yield from _check_source(context, "hub", HUB, "VLLM_LORA_RESOLVER_HF_REPO_LIST", _hub)
    yield _check_asked(context)
    yield _check_switch(context, "manager", MANAGER, _OF_MANAGER, "vLLM's own LoRA manager runs")
    yield from _check_kernels(context)
    yield from _check_admin(context)


def _check_source(
    context: Context, check: str, plugin: str, variable: str, check_source: Callable[[Context], Iterator[Finding]]
) -> Iterator[Finding]:
    off = context.why_off(plugin)
    is_set = bool(context.env.get(variable))
    if off and is_set:
        builtin = ""
        if plugin != S3 and off == "VLLM_PLUGINS is unset":
            builtin = "; vLLM's builtin of this name runs instead"
        yield Finding(
            check, State.WARNING, f"off: {variable} is set, but {off}{builtin}", f"add {plugin} to VLLM_PLUGINS"
        )
    elif off:
        yield Finding(check, State.OFF, off)
    elif not is_ours(plugin, context.discovered):
        yield missing_entry_point(check)
    elif not is_set:
        yield Finding(
            check, State.PROBLEM, f"VLLM_PLUGINS names {plugin}, but {variable} is unset: it serves nothing",
            f"set {variable}",
        )  # fmt: skip
    else:
        try:
            yield from check_source(context)
        except LoRAPluginsError as error:
            yield problem_of(check, error)


def _filesystem(context: Context) -> Iterator[Finding]:
    filesystem_source(context.settings)
    root = context.settings.filesystem_root
    if root is None:
        return  # its variable cannot be right, which another check reports
    try:
        count = _adapters_below(root)
    except OSError as error:
        yield Finding(
            "filesystem", State.PROBLEM, f"{root} cannot be read: {error.strerror}", "let the server's user read it"
        )
        return
    if count:
        yield Finding("filesystem", State.ON, f"{root}: {number(count, 'adapter')} in it and its folders")
    else:
        yield Finding(
            "filesystem",
            State.WARNING,
            f"{root}: no {CONFIG_FILE} in its folders or theirs",
            "put adapters there as <name>/ or <team>/<name>/",
        )


def _adapters_below(root: Path) -> int:
    """Adapters in folders of `root` and in folders of those; of a huge tree, only the beginning is read."""
    count = looked = 0
    folders = [entry for entry in os.scandir(root) if entry.is_dir()]
    for folder in folders:
        below = [folder.path]
        try:
            below += [entry.path for entry in os.scandir(folder) if entry.is_dir()]
        except PermissionError:
            continue
        count += sum(os.path.lexists(os.path.join(path, CONFIG_FILE)) for path in below)
        looked += len(below)
        if looked > _MAX_FOLDERS:
            break
    return count


def _s3(context: Context) -> Iterator[Finding]:
    s3_source(context.settings)
    template = context.settings.s3_path_template or ""
    if not context.network:
        yield Finding("s3", State.ON, f"{without_login(template)} (not asked)")
        return
    yield asyncio.run(reach_s3(template, context.settings, context.timeout_s))


def _hub(context: Context) -> Iterator[Finding]:
    hub_source(context.settings)
    repos = context.settings.hub_repos
    if not context.network:
        yield Finding("hub", State.ON, f"{', '.join(repos)} (not asked)")
        return
    if is_offline():
        yield Finding("hub", State.ON, "HF_HUB_OFFLINE is set: what the Hub's cache on this host has is served")
        return
    yield from asyncio.run(reach_hub(repos, context.timeout_s))


def _check_asked(context: Context) -> Finding:
    """Whether vLLM asks resolvers at all."""
    if context.settings.runtime_lora_updating:
        return Finding("runtime", State.ON, "vLLM asks resolvers for unknown names")
    named = [plugin for plugin in (FILESYSTEM, S3, HUB) if not context.why_off(plugin)]
    return Finding(
        "runtime",
        State.PROBLEM if named else State.OFF,
        "vLLM asks no resolver: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1",
        "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    )


def _check_switch(context: Context, check: str, plugin: str, variables: tuple[str, ...], instead: str) -> Finding:
    off = context.why_off(plugin)
    unused = [name for name in variables if context.env.get(name)]
    if off and unused:
        return Finding(
            check,
            State.WARNING,
            f"off: {' and '.join(unused)} set, but {off}",
            f"add {plugin} to VLLM_PLUGINS",
        )
    if off:
        return Finding(check, State.OFF, f"{off}: {instead}")
    if not is_ours(plugin, context.discovered):
        return missing_entry_point(check)
    return Finding(check, State.ON, f"VLLM_PLUGINS names {plugin}")


def _check_kernels(context: Context) -> Iterator[Finding]:
    finding = _check_switch(context, "kernels", KERNELS, _OF_KERNELS, "vLLM's own kernels compute adapters")
    cpu = is_cpu_build()
    if finding.state is not State.ON or cpu is None:
        yield finding
        return
    platform = "cpu" if cpu else "cuda"
    try:
        machine = dispatch.Machine(platform, dispatch.triton_is_there(), build.problem)
        choice = dispatch.choose(context.settings.kernels, machine)
    except InvalidSettings as error:
        yield problem_of("kernels", error)
        return
    yield Finding("kernels", State.ON, f"{choice.kernels} ({choice.why})")


def _check_admin(context: Context) -> Iterator[Finding]:
    finding = _check_switch(context, "admin", ADMIN, _OF_ADMIN, "no admin API, no hot swap")
    if finding.state is State.ON and context.why_off(MANAGER):
        yield Finding(
            "admin",
            State.PROBLEM,
            f"VLLM_PLUGINS names {ADMIN}, which needs {MANAGER}; {context.why_off(MANAGER)}",
            f"add {MANAGER} to VLLM_PLUGINS",
        )
        return
    yield finding
