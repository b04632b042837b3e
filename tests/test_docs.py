"""The documentation: links, the places of pages in the site, and pages that scripts write."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import deployments
from benchmarks.models import architectures as models
from testbed.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent


def test_the_matrix_of_models_is_what_was_measured():
    result = json.loads(models.KEPT.read_text())
    assert models.PAGE.read_text() == models.page(result)
    assert "**wrong**" not in models.page(result)
    measured = {(row["architecture"], row["kind"]) for row in result["rows"]}
    assert measured == {(one.label, kind) for one in ARCHITECTURES for kind in ("", *one.kinds())}


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


def test_the_page_on_security_quotes_the_warning_of_vllm():
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    router = Path(vllm.origin).parent / "entrypoints" / "serve" / "lora" / "api_router.py"
    (warning,) = [
        node.args[0].value
        for node in ast.walk(ast.parse(router.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning"
    ]
    page = " ".join((ROOT / "docs" / "operate" / "security.md").read_text().replace("> ", "").split())
    assert warning in page
