"""`doctor`: whether lora-plugins would serve in this environment, and what keeps it from serving.

Runs in the command's process; no engine starts. In: the environment's variables, the installed packages, and with
`--url` a running server. Out: the findings of every check, in the order of a server's start, and a verdict in one
sentence. The checks are in `checks.py` and `source_checks.py`; a running server is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins import plugin_names
from lora_plugins.api.models import AdapterList, DeclaredState
from lora_plugins.cli import Exit, checks, source_checks
from lora_plugins.cli.checks import of_plugin, unless_wrong
from lora_plugins.cli.doctor_context import Check, Context, ok, problem, warning
from lora_plugins.cli.output import Result, line, number, steps_table
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.client.attempt import object_of
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.findings import State, Step, discovered_plugins, problem_of
from lora_plugins.plugin_names import ADMIN, KERNELS, MANAGER, OTHERS
from lora_plugins.settings import NEEDS, SOURCE_LABELS, environment
from lora_plugins.vllm_patches import vllm_releases, vllm_sources

_STYLES: Mapping[str, str] = dict(zip(State, ("green", "green", "dim", "yellow", "bold red"), strict=True))
_OF_MANAGER = ("LORA_PLUGINS_HOST_MAX_BYTES", "LORA_PLUGINS_HOST_POLICY", "LORA_PLUGINS_UNMATCHED")
_OF_KERNELS = ("LORA_PLUGINS_KERNELS",)
_OF_ADMIN = tuple(
    f"LORA_PLUGINS_{name}" for name in ("ADAPTERS_FILE", "PRELOAD", "RESTORE", "REFRESH_S", "DRAIN_TIMEOUT_S", "POLICY")
)
_VLLMS_MANAGER = "vLLM's own runs, and a request with prompt_logprobs beside others may crash an engine on the CPU"
_VLLMS_KERNELS = "vLLM's own kernels compute adapters"
# In the order of a server's start.
CHECKS: Mapping[str, Check] = {
    "vllm": checks.vllm,
    "settings": checks.settings,
    "plugins": checks.plugins,
    **{
        kind.label: of_plugin(kind.plugin, (NEEDS[kind.plugin],), source_checks.source(kind.plugin))
        for kind in plugin_names.SOURCES
    },
    "sources": source_checks.others,
    "runtime": checks.runtime,
    "manager": of_plugin(MANAGER, _OF_MANAGER, checks.named(MANAGER), _VLLMS_MANAGER),
    "kernels": checks.or_vllms_kernels(
        of_plugin(KERNELS, _OF_KERNELS, unless_wrong(*_OF_KERNELS, checks.kernels), _VLLMS_KERNELS)
    ),
    "admin": of_plugin(ADMIN, _OF_ADMIN, checks.admin, "no admin API, no hot swap"),
    "store": unless_wrong("LORA_PLUGINS_STORE_DIR", checks.store),
    "policy": unless_wrong("LORA_PLUGINS_POLICY", checks.policy),
    "adapters": unless_wrong("LORA_PLUGINS_ADAPTERS_FILE", checks.adapters_file),
}

_SHOWN = 3
_NOTHING = "nothing is served by lora-plugins"
_NAMES_OF_SOURCES = {**{label: label for label in SOURCE_LABELS}, "sources": OTHERS}  # by check


def doctor(
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Compare a server at this address with what is here.")
    ] = None,
    network: Annotated[bool, typer.Option(help="Ask S3 and the Hub whether they answer.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each question.")] = 5.0,
) -> Result:
    """Say what is on, off or broken in this environment, and why.

    Examples:
        doctor
        doctor --url http://127.0.0.1:8000
        doctor --no-network --json
    """
    client = None if url is None else AdminClient(url, timeout_s)
    context = Context(environment(), discovered_plugins(), vllm_sources.installed(), network, timeout_s)
    found = examine(context, client)
    sentence = verdict(found, context.env)
    problems, warnings = (sum(item.state is state for item in found) for state in (State.PROBLEM, State.WARNING))
    fields = {"healthy": problems == 0, "problems": problems, "warnings": warnings, "verdict": sentence}
    fields["findings"] = [item._asdict() for item in found]
    style = "bold red" if problems else "yellow" if warnings else "bold green"
    counts = line(f"\n{number(problems, 'problem')}, {number(warnings, 'warning')}", style)
    shown = steps_table(("", "", ""), found, _STYLES), counts, line(sentence, "bold")
    return Result(fields, shown, Exit.WRONG if problems else Exit.OK)


def examine(context: Context, client: AdminClient | None = None) -> list[Step]:
    """Return the findings of every check, and with a client the findings about its server; our errors are problems."""
    found: list[Step] = []
    of_server: Mapping[str, Check] = {} if client is None else {"server": partial(_server, client)}
    for name, check in {**CHECKS, **of_server}.items():
        try:
            found += (finding._replace(check=name) for finding in check(context))
        except LoRAPluginsError as error:
            found.append(problem_of(error)._replace(check=name))
    return found


def verdict(found: Sequence[Step], env: Mapping[str, str]) -> str:
    """Return what lora-plugins serves, or the first obstacle."""
    # A server's problem may be of another environment.
    problems = {item.check: item for item in reversed(found) if item.state is State.PROBLEM and item.check != "server"}
    if "vllm" in problems:
        return f"{_NOTHING}: {problems['vllm'].found}"
    if "VLLM_PLUGINS" not in env:
        return f"{_NOTHING}: set VLLM_PLUGINS"
    if problems:
        first = next(check for check in ("settings", "plugins", *reversed(problems)) if check in problems)
        return f"not all that is asked for is served: first mend '{first}'"
    # A warning may be of a plugin that is set and off.
    runs = {item.check for item in found if item.state in (State.ON, State.WARNING) and item.found[:4] != "off:"}
    asked = [name for check, name in _NAMES_OF_SOURCES.items() if check in runs]
    if asked and "runtime" not in runs:
        return f"{_NOTHING} by name: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    if not asked and "admin" not in runs:
        return f"{_NOTHING} by name: VLLM_PLUGINS names no source of adapters"
    is_on = {item.check for item in found if item.state is State.ON}
    # A source without adapters has a warning, and nothing that is on.
    if sources := [name for check, name in _NAMES_OF_SOURCES.items() if check in is_on]:
        where = f"adapters are served by name from {', '.join(sources)}"
    else:
        where = f"no adapter was found in {', '.join(asked)}" if asked else "adapters are served by URI alone"
    return f"{where}; {'with' if 'admin' in runs else 'without'} the admin API"


def _server(client: AdminClient, context: Context) -> Iterator[Step]:
    """Compare a running server's version, plugins, adapters and store with this environment's."""
    version = str(object_of(client.text("/version")).get("version", "of no known version"))
    here = version if context.vllm is None else vllm_releases.installed_version(context.vllm)
    # Builds of a version differ behind the plus only, such as +cpu.
    if here.partition("+")[0] == version.partition("+")[0]:
        yield ok(f"{client.url} is vLLM {version}")
    else:
        found = f"{client.url} is vLLM {version}, and {here} is installed here"
        yield warning(found, "run doctor where the server runs")
    metrics, denied = "", None
    try:
        metrics = client.text("/metrics/")  # `/metrics` leads there
    except LoRAPluginsError as error:
        yield warning(f"/metrics: {error.found}", "its plugins are judged by its routes alone")
    try:
        listed = client.adapters()
    except LoRAPluginsError as error:
        listed, denied = None, error if "denies" in error.found else None
    # A server that denies the list has the routes: only the caller's key is wrong.
    runs = {ADMIN: listed is not None or denied is not None}
    if metrics and not runs[ADMIN] and "# TYPE lora_plugins_" not in metrics:
        yield problem(
            "none of our metrics, no admin API: no plugin of lora-plugins runs in it",
            "name the plugins that are wanted in the server's VLLM_PLUGINS",
        )
        return
    if metrics:
        runs = {MANAGER: "# TYPE lora_plugins_held" in metrics, **runs}
    for plugin, does in runs.items():
        is_named, text = not context.why_off(plugin), f"{plugin} {'runs' if does else 'does not run'}"
        if does == is_named:
            yield ok(f"{text}, as in this environment")
        else:
            remedy = "run doctor with the server's variables, or restart the server with these"
            yield warning(f"{text}, and this environment {'names' if is_named else 'does not name'} it", remedy)
    if denied is not None:
        raise denied
    if listed is not None:
        yield from _adapters(listed, context.settings.store_dir)


def _adapters(listed: AdapterList, store: Path) -> Iterator[Step]:
    broken = [f"{one.lora_name}: {one.last_error.message}" for one in listed.loras if one.last_error is not None]
    declared = [] if listed.declared is None else listed.declared.loras
    broken += [f"declared and not served: {one.lora_name}" for one in declared if one.state is DeclaredState.FAILED]
    yield from map(warning, broken[:_SHOWN])
    if len(broken) > _SHOWN:
        yield warning(f"{len(broken) - _SHOWN} more with an error: 'lora-plugins ls --server' has all")
    if listed.short_of:
        yield warning("requests have waited for others' adapters, while memory was left", f"raise {listed.short_of}")
    places = {Path(one.path).parent for one in listed.loras if one.digest is not None and one.path is not None}
    if others := sorted(map(str, places - {store})):
        yield warning(
            f"its adapters lie in {others[0]}, and this environment's store is {store}",
            "set LORA_PLUGINS_STORE_DIR as the server has it, or ignore this for a server in a container",
        )
    yield ok(f"{number(listed.count, 'adapter')} listed")
