"""The documentation: every relative link leads to a file, and to a heading where it names one; generated pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import models
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
