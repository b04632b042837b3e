"""What a running server says of itself, compared with what this environment would make of one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lora_plugins.api.models import AdapterList, DeclaredState
from lora_plugins.cli.admin_client import AdminClient
from lora_plugins.cli.amounts import number
from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.cli.doctor.plugins import Context
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import check as ledger_check
from lora_plugins.plugin_names import ADMIN, MANAGER
from lora_plugins.vllm_patches import versions

# Metrics that a server has from its start, and what must run for them.
_OF_OURS = re.compile(r"^# TYPE lora_plugins_", re.MULTILINE)
_OF_MANAGER = re.compile(r"^# TYPE lora_plugins_held\b", re.MULTILINE)
_RERUN = "run doctor with the server's variables, or restart the server with these"
_SHOWN = 3


def check_server(client: AdminClient, context: Context) -> Iterator[Finding]:
    """Its version, its plugins, its adapters and its store; each beside what is here."""
    try:
        yield _check_version(client)
    except LoRAPluginsError as error:
        yield problem_of("server", error)
        return
    try:
        metrics = client.text("/metrics")
    except LoRAPluginsError as error:
        metrics = ""
        yield Finding("server", State.WARNING, f"/metrics: {error.found}", "its plugins are judged by its routes alone")
    listed: AdapterList | None = None
    refused: LoRAPluginsError | None = None
    try:
        listed = client.adapters()
    except LoRAPluginsError as error:
        refused = error
    has_admin = listed is not None or (refused is not None and "denies" in refused.found)
    if metrics:
        if not _OF_OURS.search(metrics) and not has_admin:
            yield Finding(
                "server",
                State.PROBLEM,
                "none of our metrics, no admin API: no plugin of lora-plugins runs in it",
                "name the plugins that are wanted in the server's VLLM_PLUGINS",
            )
            return
        yield _compare(context, MANAGER, runs=bool(_OF_MANAGER.search(metrics)))
    yield _compare(context, ADMIN, runs=has_admin)
    if listed is not None:
        yield from _check_adapters(listed, context.settings.store_dir)
    elif has_admin and refused is not None:
        yield problem_of("server", refused)


def _check_version(client: AdminClient) -> Finding:
    answer = client.text("/version")
    try:
        version = str(json.loads(answer)["version"])
    except (ValueError, KeyError, TypeError):
        return Finding("server", State.WARNING, f"{client.url} answers, and does not say which vLLM it is", "")
    sources = ledger_check.installed()
    here = None if sources is None else versions.installed_version(sources)
    if here is not None and here.partition("+")[0] != version.partition("+")[0]:
        return Finding(
            "server",
            State.WARNING,
            f"{client.url} is vLLM {version}, and {here} is installed here",
            "run doctor where the server runs",
        )
    return Finding("server", State.OK, f"{client.url} is vLLM {version}")


def _compare(context: Context, plugin: str, *, runs: bool) -> Finding:
    is_named = not context.why_off(plugin)
    if runs == is_named:
        return Finding("server", State.OK, f"{plugin} {'runs' if runs else 'does not run'}, as in this environment")
    found = f"{plugin} runs, and this environment does not name it"
    if is_named:
        found = f"{plugin} does not run, and this environment names it"
    return Finding("server", State.WARNING, found, _RERUN)


def _check_adapters(listed: AdapterList, store: Path) -> Iterator[Finding]:
    broken = [one for one in listed.loras if one.last_error is not None]
    for one in broken[:_SHOWN]:
        error = one.last_error
        yield Finding("server", State.WARNING, f"{one.lora_name}: {'' if error is None else error.message}", "")
    if len(broken) > _SHOWN:
        yield Finding("server", State.WARNING, f"{len(broken) - _SHOWN} more with an error: 'lora-plugins top' has all")
    declared = [] if listed.declared is None else listed.declared.loras
    failed = [one.lora_name for one in declared if one.state is DeclaredState.FAILED]
    if failed:
        yield Finding("server", State.WARNING, f"declared and not served: {', '.join(failed[:_SHOWN])}", "see its log")
    places = {Path(one.path).parent for one in listed.loras if one.digest is not None and one.path is not None}
    others = sorted(str(place) for place in places if place != store)
    if others:
        yield Finding(
            "server",
            State.WARNING,
            f"its adapters lie in {others[0]}, and this environment's store is {store}",
            "set LORA_PLUGINS_STORE_DIR as the server has it, or ignore this for a server in a container",
        )
    yield Finding("server", State.OK, f"{number(listed.count, 'adapter')} listed")
