"""`doctor`: every check in the order of a server's start, a running server's answers, and a verdict in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins.api.models import AdapterList, DeclaredState
from lora_plugins.cli import Exit, checks, source_checks
from lora_plugins.cli.checks import Check, Context, of_plugin, ok, problem, unless_wrong, warning
from lora_plugins.cli.output import Result, line, number, steps_table
from lora_plugins.cli.server import AdminClient
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.findings import State, Step, discovered_plugins, problem_of
from lora_plugins.ledger import check as ledger_check
from lora_plugins.plugin_names import ADMIN, FILESYSTEM, HUB, KERNELS, MANAGER, NEEDS, OTHERS, S3
from lora_plugins.settings import SOURCES, environment
from lora_plugins.vllm_patches import versions

_STYLES: Mapping[str, str] = {
    State.OK: "green",
    State.ON: "green",
    State.OFF: "dim",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
}
_OF_MANAGER = ("LORA_PLUGINS_HOST_MAX_BYTES", "LORA_PLUGINS_HOST_POLICY", "LORA_PLUGINS_UNMATCHED")
_OF_KERNELS = ("LORA_PLUGINS_KERNELS",)
_OF_ADMIN = (
    "LORA_PLUGINS_ADAPTERS_FILE",
    "LORA_PLUGINS_PRELOAD",
    "LORA_PLUGINS_RESTORE",
    "LORA_PLUGINS_REFRESH_S",
    "LORA_PLUGINS_DRAIN_TIMEOUT_S",
    "LORA_PLUGINS_POLICY",
)
# In the order of a server's start.
CHECKS: Mapping[str, Check] = {
    "vllm": checks.vllm,
    "ledger": checks.ledger,
    "settings": checks.settings,
    "plugins": checks.plugins,
    "filesystem": of_plugin(FILESYSTEM, (NEEDS[FILESYSTEM],), source_checks.filesystem),
    "s3": of_plugin(S3, (NEEDS[S3],), source_checks.s3),
    "hub": of_plugin(HUB, (NEEDS[HUB],), source_checks.hub),
    "sources": source_checks.others,
    "runtime": checks.runtime,
    "manager": of_plugin(MANAGER, _OF_MANAGER, checks.manager, "vLLM's own LoRA manager runs"),
    "kernels": checks.or_vllms_kernels(
        of_plugin(
            KERNELS, _OF_KERNELS, unless_wrong(*_OF_KERNELS, checks.kernels), "vLLM's own kernels compute adapters"
        )
    ),
    "admin": of_plugin(ADMIN, _OF_ADMIN, checks.admin, "no admin API, no hot swap"),
    "store": unless_wrong("LORA_PLUGINS_STORE_DIR", checks.store),
    "policy": unless_wrong("LORA_PLUGINS_POLICY", checks.policy),
    "adapters": unless_wrong("LORA_PLUGINS_ADAPTERS_FILE", checks.adapters_file),
}

# Metrics of a server from its start, each of a plugin.
_OURS = re.compile(r"^# TYPE lora_plugins_", re.MULTILINE)
_HELD = re.compile(r"^# TYPE lora_plugins_held\b", re.MULTILINE)
_SHOWN = 3
_NOTHING = "nothing is served by lora-plugins"


def doctor(
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask the server at this address too, and compare it with what is here.")
    ] = None,
    network: Annotated[bool, typer.Option(help="Ask S3 and the Hub whether they answer.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each question.")] = 5.0,
) -> Result:
    """Say what is on, off or broken in this environment, and why."""
    client = None if url is None else AdminClient(url, timeout_s)
    context = Context(environment(), discovered_plugins(), ledger_check.installed(), network, timeout_s)
    found = examine(context, client)
    sentence = verdict(found, context.env)
    problems = sum(item.state is State.PROBLEM for item in found)
    warnings = sum(item.state is State.WARNING for item in found)
    fields = {
        "healthy": problems == 0,
        "problems": problems,
        "warnings": warnings,
        "verdict": sentence,
        "findings": [item._asdict() for item in found],
    }
    counts = f"{number(problems, 'problem')}, {number(warnings, 'warning')}"
    style = "bold red" if problems else "yellow" if warnings else "bold green"
    shown = steps_table(("", "", ""), found, _STYLES)
    end = line(counts, style), line(sentence, "bold")
    return Result(fields, [shown, line(), *end], Exit.WRONG if problems else Exit.OK)


def examine(context: Context, client: AdminClient | None = None) -> list[Step]:
    """Return the findings of every check, and with a client the findings about its server."""
    checks = dict(CHECKS)
    if client is not None:
        checks["server"] = partial(_server, client)
    return [finding for name, check in checks.items() for finding in _run(name, check, context)]


def _run(name: str, check: Check, context: Context) -> Iterator[Step]:
    """Return the findings of a check; an error of ours in the check is a problem."""
    try:
        for finding in check(context):
            yield finding._replace(check=name)
    except LoRAPluginsError as error:
        yield problem_of(error)._replace(check=name)


def verdict(found: Sequence[Step], env: Mapping[str, str]) -> str:
    """Return what lora-plugins serves, or the first obstacle."""
    # A server's problem may be of another environment.
    problems = [item for item in found if item.state is State.PROBLEM and item.check != "server"]
    vllm = next((item for item in problems if item.check == "vllm"), None)
    if vllm is not None:
        return f"{_NOTHING}: {vllm.found}"
    if "VLLM_PLUGINS" not in env:
        return f"{_NOTHING}: set VLLM_PLUGINS"
    if problems:
        first = next((item for item in problems if item.check in ("settings", "plugins")), problems[0])
        return f"not all that is asked for is served: first mend '{first.check}'"
    # A warning may be of a plugin that is set and off.
    runs = {item.check for item in found if item.state in (State.ON, State.WARNING) and item.found[:4] != "off:"}
    is_on = {item.check for item in found if item.state is State.ON}
    by_check = {**{check: check for check in SOURCES}, "sources": OTHERS}
    asked = [name for check, name in by_check.items() if check in runs]
    sources = [name for check, name in by_check.items() if check in is_on]
    if not asked and "admin" not in runs:
        return f"{_NOTHING} by name: VLLM_PLUGINS names no source of adapters"
    if asked and "runtime" not in runs:
        return f"{_NOTHING} by name: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    where = "adapters are served by URI alone"
    if asked:
        # A source without adapters has a warning, and nothing that is on.
        where = f"no adapter was found in {', '.join(asked)}"
    if sources:
        where = f"adapters are served by name from {', '.join(sources)}"
    return f"{where}; {'with' if 'admin' in runs else 'without'} the admin API"


def _server(client: AdminClient, context: Context) -> Iterator[Step]:
    """Compare a running server's version, plugins, adapters and store with this environment's."""
    yield _version(client, context)
    metrics = ""
    try:
        metrics = client.text("/metrics/")  # `/metrics` leads there
    except LoRAPluginsError as error:
        yield warning(f"/metrics: {error.found}", "its plugins are judged by its routes alone")
    listed: AdapterList | LoRAPluginsError
    try:
        listed = client.adapters()
    except LoRAPluginsError as error:
        listed = error
    # A server that denies the list has the routes: only the caller's key is wrong.
    has_admin = isinstance(listed, AdapterList) or "denies" in listed.found
    if metrics and not has_admin and not _OURS.search(metrics):
        yield problem(
            "none of our metrics, no admin API: no plugin of lora-plugins runs in it",
            "name the plugins that are wanted in the server's VLLM_PLUGINS",
        )
        return
    if metrics:
        yield _plugin(context, MANAGER, runs=_HELD.search(metrics) is not None)
    yield _plugin(context, ADMIN, runs=has_admin)
    if isinstance(listed, AdapterList):
        yield from _adapters(listed, context.settings.store_dir)
    elif has_admin:
        raise listed


def _version(client: AdminClient, context: Context) -> Step:
    answer = client.text("/version")
    try:
        version = str(json.loads(answer)["version"])
    except (ValueError, KeyError, TypeError):
        return warning(f"{client.url} answers, and does not say which vLLM it is")
    here = None if context.vllm is None else versions.installed_version(context.vllm)
    # Builds of a version differ behind the plus only, such as +cpu.
    if here is not None and here.partition("+")[0] != version.partition("+")[0]:
        found = f"{client.url} is vLLM {version}, and {here} is installed here"
        return warning(found, "run doctor where the server runs")
    return ok(f"{client.url} is vLLM {version}")


def _plugin(context: Context, plugin: str, *, runs: bool) -> Step:
    does, is_named = "runs" if runs else "does not run", not context.why_off(plugin)
    if runs == is_named:
        return ok(f"{plugin} {does}, as in this environment")
    names = "names" if is_named else "does not name"
    remedy = "run doctor with the server's variables, or restart the server with these"
    return warning(f"{plugin} {does}, and this environment {names} it", remedy)


def _adapters(listed: AdapterList, store: Path) -> Iterator[Step]:
    broken = [f"{one.lora_name}: {one.last_error.message}" for one in listed.loras if one.last_error is not None]
    yield from map(warning, broken[:_SHOWN])
    if len(broken) > _SHOWN:
        yield warning(f"{len(broken) - _SHOWN} more with an error: 'lora-plugins ls --server' has all")
    declared = [] if listed.declared is None else listed.declared.loras
    failed = [one.lora_name for one in declared if one.state is DeclaredState.FAILED]
    if failed:
        yield warning(f"declared and not served: {', '.join(failed[:_SHOWN])}", "see its log")
    places = {Path(one.path).parent for one in listed.loras if one.digest is not None and one.path is not None}
    others = sorted(str(place) for place in places if place != store)
    if others:
        yield warning(
            f"its adapters lie in {others[0]}, and this environment's store is {store}",
            "set LORA_PLUGINS_STORE_DIR as the server has it, or ignore this for a server in a container",
        )
    yield ok(f"{number(listed.count, 'adapter')} listed")
