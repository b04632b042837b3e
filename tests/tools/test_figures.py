"""The figures of the house: what is counted, on a tree of three modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "figures.py"
spec = importlib.util.spec_from_file_location("figures", TOOL)
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

MODULES = {
    "__init__.py": '"""A package."""\n',
    "a.py": "class One:\n    pass  # why\n\n\nimport os  # noqa: E402\nimport sys  # noqa: E402 - said below\n",
    "deep/b.py": "# why\nclass One:\n    text = '# no comment'\n\n\nclass Two:\n    pass\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        path = tmp_path / "lora_plugins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_b.py").write_text("def test_one():\n    pass\n")
    return tmp_path


def test_each_figure_is_counted(root: Path) -> None:
    assert dict(figures.static(root)) == {
        "product lines, files": "14, 3",
        "lines with a comment": "3 (21.4%)",
        "class names that several have": "1: One",
        "modules whose test is found in one guess": "1 of 2",
        "test lines, files": "2, 1",
    }


def test_modules_without_their_test_are_named(root: Path) -> None:
    assert figures.without_their_test(root) == (["a.py"], 2)
