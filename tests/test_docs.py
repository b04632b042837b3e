"""The documentation: every relative link leads to a file, and to a heading where it names one; generated pages."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import deployments, models
from testbed.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as Markdown renderers name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_linked_from_the_readme():
    linked = {path for path, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_matrix_of_models_is_what_was_measured():
    result = json.loads(models.KEPT.read_text())
    assert models.PAGE.read_text() == models.page(result)
    assert "wrong" not in models.page(result)
    measured = {(row["architecture"], row["kind"]) for row in result["rows"]}
    assert measured == {(one.name, kind) for one in ARCHITECTURES for kind in ("", *one.kinds())}


def deployment(cell: str, **changes: object) -> dict[str, object]:
    part = deployments.Part(cell, "tested", "answers are right", "engine", {"tests/e2e/test_x.py::test_y": "passed"})
    return {**asdict(part), **changes, "is_broken": replace(part, **changes).is_broken}


def test_a_deployment_whose_test_fails_is_broken():
    failed = {"tests/e2e/test_x.py::test_y": "failed", "tests/e2e/test_x.py::test_z": "passed"}
    table = deployments.table([deployment("one worker"), deployment("tensor parallel", tests=failed)])
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    assert "| one worker | tested | real engine, 1 test, 0 s | answers are right |" in lines["one worker"]
    assert "**broken**" in lines["tensor parallel"]
    assert "**broken**" in lines["Ray"], "nothing carries it"
    assert deployment("Ray", tests={})["is_broken"]


def test_a_skipped_deployment_is_said_not_to_have_run():
    table = deployments.table([deployment("Ray", tests={"tests/e2e/test_x.py::test_y": "skipped: no Ray"})])
    assert "| Ray | not run here (skipped: no Ray) |" in table


def test_marks_of_deployments_name_cells_and_verdicts():
    marks = re.compile(r'mark\.deployment\(\s*"([^"]+)",\s*"([^"]+)"')
    found = [mark for file in (ROOT / "tests").rglob("test_*.py") for mark in marks.findall(file.read_text())]
    cells = {cell for of_part in deployments.CELLS.values() for cell in of_part}
    assert {cell for cell, _ in found} <= cells
    assert {verdict for _, verdict in found} == set(deployments.VERDICTS)


def test_the_matrix_of_deployments_is_what_was_run():
    if not deployments.KEPT.exists():
        pytest.skip("make matrix has not been run to its end")
    page = deployments.PAGE.read_text()
    assert page == deployments.page(page, json.loads(deployments.KEPT.read_text()))
    assert "**broken** |" not in page.partition(deployments.BEGIN)[2]
