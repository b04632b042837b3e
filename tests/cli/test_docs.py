"""docs/guides/command-line.md against the commands: exit codes, commands and every field of their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.cli import Exit
from lora_plugins.cli.commands import EXAMPLES

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "command-line.md").read_text()
# Their keys are modules, patterns and dtypes of the adapter.
BY_DATA = ("rank_pattern", "alpha_pattern", "dtypes")
COMMANDS = {
    "doctor": ["--no-network"],
    "why": ["sql"],
    "inspect": ["{adapters}/sql"],
    "pull": ["sql"],
    "ls": [],
    "verify": [],
    "gc": ["--max-bytes", "1", "--dry-run"],
    "rm": ["team/poet", "--dry-run"],
}
VERDICTS = {"served", "found", "unknown", "refused", "unavailable", "yes", "no", "failed"}
VERDICTS |= {"ok", "on", "off", "warning", "problem", "paused", "waiting", "removed", "leased"}
# With a base model or a conversion, which these runs are without.
ELSEWHERE = {"inspect": {"tensor", "shape", "form", "original_digest", "changes"}}


def fields(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield name
            if name not in BY_DATA:
                yield from fields(below)
    elif isinstance(value, list):
        for item in value:
            yield from fields(item)


def documented(command: str) -> set[str]:
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", PAGE.partition("## JSON")[2], re.MULTILINE)
    same = re.search(r"lists as in `(\w+)`", row)
    if same:
        (rows,) = re.findall(rf"^\| `{same[1]}` \| .*?`adapters`: list of (.*?);", PAGE, re.MULTILINE)
        row = row.replace(same[0], rows)
    return set(re.findall(r"`([a-z_]+)`", row))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_field_is_documented_and_each_documented_field_is_there(cli, command):
    cli("pull", "team/poet")
    done = cli(command, *(part.format(adapters=cli.adapters) for part in COMMANDS[command]), "--json")
    assert done.code == (Exit.NOT_COMPARED if command in ("why", "inspect") else Exit.OK)
    found = set(fields(done.json))
    assert len(found) > 4
    assert found <= documented(command)
    assert documented(command) - found - VERDICTS <= ELSEWHERE.get(command, set())


def test_every_exit_code_is_documented():
    table = PAGE.partition("## Exit codes")[2].partition("##")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert codes == {int(code) for code in Exit}


def test_every_command_is_in_the_table() -> None:
    """Their options are in docs/reference/cli.md, which `tools/write_cli_doc.py --check` compares."""
    table = PAGE.partition("| command | what it does |")[2].partition("\n\n")[0]
    assert set(EXAMPLES) == set(re.findall(r"`([a-z]+)(?: [^`]*)?`", table))
