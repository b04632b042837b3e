"""Each promise of SECURITY.md names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "SECURITY.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def promises() -> list[str]:
    """The rows of the tables whose last column is of tests."""
    rows: list[str] = []
    is_open = False
    for line in PAGE.read_text().splitlines():
        if re.fullmatch(r"\|.*\| tests \|", line):
            is_open = True
        elif not line.startswith("|"):
            is_open = False
        elif is_open and not line.startswith("|---"):
            rows.append(line)
    return rows


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_each_promise_names_tests_that_are_there() -> None:
    assert len(promises()) >= 30
    for row in promises():
        named = _TEST.findall(row.split("|")[-2])
        assert named, f"no test for: {row}"
        assert [(file, name) for file, name in named if name not in functions(ROOT / file)] == []


def test_the_promises_section_holds_nothing_but_tables() -> None:
    section = PAGE.read_text().partition("## What we promise")[2].partition("\n## ")[0]
    prose = [line for line in section.splitlines()[3:] if line and not line.startswith(("|", "### "))]
    assert prose == []
