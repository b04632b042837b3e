"""`explain CODE`: what an error code means, from the package's own copy of the documentation's page of errors.

Runs in the command's process, without a network. `tools/write_cli_doc.py` writes the copy, `errors.md`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lora_plugins.cli import UsageProblem
from lora_plugins.cli.output import Result, line

PAGE = Path(__file__).with_name("errors.md")  # `plain` of docs/reference/errors.md, written by tools/write_cli_doc.py


def explain(code: Annotated[str, typer.Argument(help="The code of an error, such as L003.")]) -> Result:
    """Say what the code of an error means, and what to do.

    Examples:
        explain L003
    """
    page, code = PAGE.read_text(encoding="utf-8"), code.strip("[]").upper()
    rows = {row[0]: row for row in re.findall(r"^\| (L\d{3}) \| `(\w+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)}
    if code not in rows:
        raise UsageProblem(f"{code}: no code of an error; there are {', '.join(rows)}")
    _, kind, when, http = rows[code]
    section = page.partition(f"\n### {code}\n")[2].partition("\n#")[0].strip()
    fields = {"code": code, "kind": kind, "when": when, "http": http, "remedy": section}
    shown = [line(f"{code} {kind}", "bold"), line(f"when: {when}"), line(f"HTTP: {http}"), line()]
    return Result(fields, [*shown, *map(line, section.splitlines())])


def plain(text: str) -> str:
    # A terminal cannot open the page's links.
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
