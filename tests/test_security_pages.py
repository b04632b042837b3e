"""Each promise of the pages on security names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("SECURITY.md", "docs/operate/security.md")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def promises(page: str) -> list[str]:
    """The rows of the tables whose last column is of tests."""
    rows: list[str] = []
    is_open = False
    for line in (ROOT / page).read_text().splitlines():
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


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_names_tests_that_are_there(page: str) -> None:
    assert len(promises(page)) >= 5
    for row in promises(page):
        named = _TEST.findall(row.split("|")[-2])
        assert named, f"no test for: {row}"
        assert [(file, name) for file, name in named if name not in functions(ROOT / file)] == []


def test_the_promises_section_holds_nothing_but_tables() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## What we promise")[2].partition("\n## ")[0]
    prose = [line for line in section.splitlines()[3:] if line and not line.startswith(("|", "### "))]
    assert prose == []
