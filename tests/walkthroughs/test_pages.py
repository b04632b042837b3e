"""Each block of each page for users is a step of a walk: it is run, written to a file, or left out for a reason."""

from __future__ import annotations

import re

import pytest

from testbed.pages import blocks
from tests.walkthroughs import (
    test_air_gapped,
    test_client_pages,
    test_clients,
    test_docker,
    test_hobbyist,
    test_installing,
    test_operator,
    test_proxy,
    test_researcher,
    test_serving_pages,
)
from tests.walkthroughs.reader import ROOT, Do, Walk

FOLDERS = ("docs/get-started", "docs/guides", "docs/operate")
MODULES = (
    test_air_gapped, test_client_pages, test_clients, test_docker, test_hobbyist, test_installing,
    test_operator, test_proxy, test_researcher, test_serving_pages,
)  # fmt: skip
WALKS = [walk for module in MODULES for walk in vars(module).values() if isinstance(walk, Walk)]
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
ALL = pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.page)


def test_every_page_with_blocks_has_one_walk() -> None:
    pages = [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))]
    with_blocks = [path.relative_to(ROOT).as_posix() for path in pages if blocks(path.read_text())]
    assert sorted(walk.page for walk in WALKS) == sorted(with_blocks)


def test_no_command_stands_outside_a_fence() -> None:
    """Markdown takes an indented paragraph for code too, but a walk does not see such code."""
    indented = re.compile(r"\n\n {4}(?! *(?:[-*]|\d+\.) )\S")
    for folder in FOLDERS:
        for path in (ROOT / folder).glob("*.md"):
            prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
            assert not indented.search(prose), path.name


@ALL
def test_every_block_is_a_step_and_substitutions_apply(walk: Walk) -> None:
    assert walk.wrong() == []


@ALL
def test_what_is_left_out_or_replaced_has_a_reason(walk: Walk) -> None:
    assert all(step.note for step in walk.steps if step.do in (Do.LEAVE_OUT, Do.WRITE))
    assert all(why for _, why in walk.substitutions.values())


@ALL
def test_tests_that_a_reason_names_exist(walk: Walk) -> None:
    for step in walk.steps:
        for path, name in NAMED_TEST.findall(step.note):
            assert (ROOT / path).is_file(), path
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
