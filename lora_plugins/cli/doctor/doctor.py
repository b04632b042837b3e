"""`doctor`: all checks, in the order of a server's start, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lora_plugins.cli.admin_client import AdminClient
from lora_plugins.cli.amounts import number
from lora_plugins.cli.doctor.findings import Finding, State
from lora_plugins.cli.doctor.installation import check_plugin_names, check_vllm, plugin_names
from lora_plugins.cli.doctor.places import check_adapters_file, check_policy, check_store
from lora_plugins.cli.doctor.plugins import Context, check_plugins
from lora_plugins.cli.doctor.server import check_server
from lora_plugins.cli.doctor.variables import check_variables
from lora_plugins.cli.doctor.verdict import verdict
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Json, Output, Quiet, printable
from lora_plugins.ledger import check as ledger_check
from lora_plugins.settings import environment

_STYLES = {
    State.OK: "green",
    State.ON: "green",
    State.OFF: "dim",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
}


def doctor(
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask the server at this address too, and compare it with what is here.")
    ] = None,
    network: Annotated[bool, typer.Option(help="Ask S3 and the Hub whether they answer.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each question.")] = 5.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Say what is on, off or broken in this environment, and why."""
    output = Output(as_json=as_json, quiet=quiet)
    client = None if url is None else AdminClient(url, timeout_s)
    found = list(_examine(environment(), client, network=network, timeout_s=timeout_s))
    sentence = verdict(found, environment())
    problems = sum(item.state is State.PROBLEM for item in found)
    warnings = sum(item.state is State.WARNING for item in found)
    output.json(
        {
            "healthy": problems == 0,
            "problems": problems,
            "warnings": warnings,
            "verdict": sentence,
            "findings": [{**asdict(item), "state": str(item.state)} for item in found],
        }
    )
    output.show(_table(found))
    output.line()
    output.line(
        f"{number(problems, 'problem')}, {number(warnings, 'warning')}",
        style="bold red" if problems else "yellow" if warnings else "bold green",
    )
    output.line(sentence, style="bold")
    return Exit.WRONG if problems else Exit.OK


def _examine(
    env: Mapping[str, str], client: AdminClient | None, *, network: bool, timeout_s: float
) -> Iterator[Finding]:
    yield from check_vllm(ledger_check.installed())
    wrong, settings = check_variables(env)
    yield from wrong
    discovered = plugin_names()
    yield from check_plugin_names(env, discovered)
    context = Context(env, settings, discovered, network, timeout_s)
    yield from check_plugins(context)
    yield from check_store(settings)
    yield check_policy(settings)
    yield from check_adapters_file(settings)
    if client is not None:
        yield from check_server(client, context)


def _table(found: Iterable[Finding]) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for item in found:
        made.add_row(item.check, Text(str(item.state), style=_STYLES[item.state]), printable(item.found))
        if item.remedy:
            made.add_row("", "", f"→ {printable(item.remedy)}")
    return made
