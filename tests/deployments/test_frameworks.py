"""RL frameworks' ways of handing adapters to vLLM: whose tokens come, by PEFT, on vLLM and on ours.

Each engine is taken through all of its forms once (`testbed/frameworks/`); a test then looks at one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from testbed.bed import Bed
from testbed.frameworks.forms import FORMS, PACKAGED, Form
from testbed.frameworks.packages import FOLDER
from testbed.frameworks.runs import OURS, run_kind
from testbed.frameworks.versions import prepare_versions

Rows = Callable[[str, bool], dict[str, dict[str, Any]]]

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rows_of(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows of a kind of engine, with our plugins or without."""
    versions = prepare_versions(bed)

    @functools.cache
    def rows(kind: str, is_ours: bool) -> dict[str, dict[str, Any]]:
        return run_kind(kind, versions, tmp_path_factory.mktemp("frameworks"), OURS if is_ours else ())

    return rows


def marked(form: Form, is_ours: bool) -> Any:
    right, stock = (", ".join(answers) for answers in (form.right, form.stock or form.right))
    note = f"{form.kind}: {form.note}; stock: {stock}; ours: {right}"
    mark = pytest.mark.deployment(form.framework, "tested", note)
    return pytest.param(form, is_ours, marks=mark, id=f"{'ours' if is_ours else 'stock'}: {form.name}")


@pytest.mark.parametrize(("form", "is_ours"), [marked(form, is_ours) for form in FORMS for is_ours in (False, True)])
def test_the_version_that_was_handed_over_answers(form: Form, is_ours: bool, rows_of: Rows) -> None:
    if form.kind in PACKAGED and not FOLDER.exists():
        pytest.skip("make test-trainers has not fetched the frameworks")
    row = rows_of(form.kind, is_ours)[form.name]
    expected = form.right if is_ours else form.stock or form.right
    assert tuple(row["whose"]) == expected, row
