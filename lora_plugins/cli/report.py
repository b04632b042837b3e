"""`doctor`: its findings as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from lora_plugins.cli.amounts import number
from lora_plugins.cli.doctor.findings import Finding, State
from lora_plugins.cli.exits import Exit
from lora_plugins.cli.output import Output, printable

_STYLES = {
    State.OK: "green",
    State.ON: "green",
    State.OFF: "dim",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
}


def report_findings(output: Output, findings: Iterable[Finding]) -> Exit:
    """Print them; a problem among them is exit code 1."""
    found = list(findings)
    problems = sum(item.state is State.PROBLEM for item in found)
    warnings = sum(item.state is State.WARNING for item in found)
    output.json(
        {
            "healthy": problems == 0,
            "problems": problems,
            "warnings": warnings,
            "findings": [{**asdict(item), "state": str(item.state)} for item in found],
        }
    )
    output.show(_table(found))
    output.line()
    output.line(
        f"{number(problems, 'problem')}, {number(warnings, 'warning')}",
        style="bold red" if problems else "yellow" if warnings else "bold green",
    )
    return Exit.WRONG if problems else Exit.OK


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
