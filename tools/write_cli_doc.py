"""Write docs/reference/cli.md from the commands of `lora_plugins.cli`, and copy the page that `explain` prints from.

    python tools/write_cli_doc.py [--check]

With `--check` nothing is written; the exit code is 1 where a file is stale.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import typer

from lora_plugins.cli.commands import app
from lora_plugins.cli.explain import PAGE as ERRORS
from lora_plugins.cli.explain import plain

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
HEAD = """\
<!-- Written by tools/write_cli_doc.py from the commands of lora_plugins/cli: change them there. -->
# Command line

After this page you know each command, with its arguments, options and examples, as `--help` has them.
[The guide](../guides/command-line.md) has the environment, the output, the JSON and the exit codes.

## Shared options
Every command takes `--quiet` and `--json`. The commands name the others that they take.

| argument, option | meaning |
|---|---|
"""
SHARED_BY = 4  # so many commands say the same of an option: the page has the row once
EVERYWHERE = ("--quiet", "--json")


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rows(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """A row for each argument, and then for each option, with what `--help` says; before each its name."""
    for each in sorted(command.get_params(context), key=lambda each: each.param_type_name != "argument"):
        record = each.get_help_record(context)
        if record is not None and each.name != "help":
            yield max(each.opts, key=len), f"| `{cell(record[0])}` | {cell(record[1])} |\n"


def context_of(name: str, command: Any) -> Any:
    return command.make_context(name, [], resilient_parsing=True)


def section(name: str, command: Any, shared: Collection[str]) -> str:
    context = context_of(name, command)
    usage = " ".join(("lora-plugins", *([name] if name else []), *command.collect_usage_pieces(context)))
    text = f"\n## {name or 'lora-plugins'}\n"
    text += "" if not name else f"{' '.join((command.help or '').split())}\n"
    text += f"\n`{usage}`\n"
    found = list(rows(command, context))
    if table := "".join(row for _, row in found if row not in shared):
        text += f"\n| argument, option | meaning |\n|---|---|\n{table}"
    if further := [f"`{each}`" for each, row in found if row in shared and each not in EVERYWHERE]:
        text += f"\nAlso [shared](#shared-options): {', '.join(further)}.\n"
    lines = [line for line in (command.epilog or "").splitlines() if line.strip() not in ("", "\b", "Examples:")]
    if name and lines:
        text += "\n```\n" + "\n".join(line.strip() for line in lines) + "\n```\n"
    return text


def page() -> str:
    group: Any = typer.main.get_command(app)
    found = (row for name, each in group.commands.items() for _, row in rows(each, context_of(name, each)))
    shared = [row for row, commands in Counter(found).items() if commands >= SHARED_BY]
    sections = (section(name, each, shared) for name, each in {"": group, **group.commands}.items())
    return HEAD + "".join(shared) + "".join(sections)


def main(arguments: list[str]) -> int:
    made = {REFERENCE / "cli.md": page(), ERRORS: plain((REFERENCE / "errors.md").read_text(encoding="utf-8"))}
    if "--check" not in arguments:
        for file, text in made.items():
            file.write_text(text, encoding="utf-8")
        return 0
    stale = [file for file, text in made.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file.name} is stale: run python tools/write_cli_doc.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
