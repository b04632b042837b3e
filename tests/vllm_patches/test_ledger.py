"""The ledger against the installed vLLM's sources, and the checker that compares them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lora_plugins
from lora_plugins.vllm_patches import ledger
from lora_plugins.vllm_patches.ledger import SEAMS, Seam
from tools import check_seams

# --- the ledger


def seam(symbol: str, *has: str, since: str = "") -> Seam:
    return Seam(symbol, has, what="", why="", since=since, remove="")


@pytest.mark.parametrize("entry", SEAMS, ids=lambda entry: entry.symbol)
def test_the_installed_vllm_has_the_seam(entry):
    assert check_seams.check(entry, check_seams.installed()) == ""


@pytest.mark.parametrize("entry", SEAMS, ids=lambda entry: entry.symbol)
def test_every_entry_says_what_why_since_and_how_to_remove_it(entry):
    assert all((entry.what, entry.why, entry.since, entry.remove))


def test_whatever_the_package_imports_from_vllm_stands_in_the_ledger():
    noted = [f"{entry.symbol.replace(':', '.')}." for entry in SEAMS]
    imported = []
    for file in Path(lora_plugins.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                imported += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    assert len(imported) > 10
    assert [name for name in imported if not any(symbol.startswith(f"{name}.") for symbol in noted)] == []


def tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(module.__file__).read_text())


def test_the_ledger_stands_alone():
    imported = [node.module for node in ast.walk(tree(ledger)) if isinstance(node, ast.ImportFrom)]
    assert imported == ["__future__", "collections.abc", "dataclasses"]
    assert not [node for node in ast.walk(tree(ledger)) if isinstance(node, ast.Import)]


def test_the_checker_runs_as_a_command_and_imports_no_vllm():
    tool = Path(check_seams.__file__)
    script = (
        f"import runpy, sys; sys.argv = ['check_seams.py']\n"
        f"try: runpy.run_path({str(tool)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'vllm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(SEAMS)
    assert all("as noted" in line for line in done.stdout.splitlines())


SOURCE = """
import os
from other import moved as Here
if os.name:
    CONSTANT: int = 1
else:
    CONSTANT = 2
async def function(a, /, b, *more, c=1, **rest): ...
class Class:
    field: int
    other = 2
    def __init__(self, x):
        self.late = x
    @overload
    def method(self, old): ...
    def method(self, new, *, key): ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "package").mkdir(parents=True)
    for name in ("vllm/__init__.py", "vllm/module.py", "vllm/package/__init__.py"):
        (tmp_path / name).write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "entry",
    [
        seam("vllm.module:function", "a", "b", "*more", "c", "**rest"),
        seam("vllm.package:function", "a", "b", "*more", "c", "**rest"),
        seam("vllm.module:function", "a", "b", "..."),
        seam("vllm.module:function", "a", "b", "*more", "c", "**rest", "..."),
        seam("vllm.module:Class"),
        seam("vllm.module:Class", "late", "field", "other", "method"),
        seam("vllm.module:Class.method", "self", "new", "key"),
        seam("vllm.module:Class.field"),
        seam("vllm.module:CONSTANT"),
        seam("vllm.module:Here"),
    ],
    ids=lambda entry: entry.symbol,
)
def test_the_checker_takes_what_is_there(sources, entry):
    assert check_seams.check(entry, sources) == ""


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (seam("vllm.gone:x"), "no module vllm.gone"),
        (seam("vllm.module:gone"), "no gone in vllm.module"),
        (seam("vllm.module:Class.gone"), "no Class.gone in vllm.module"),
        (seam("vllm.module:function.inner"), "no function.inner"),
        (seam("vllm.module:moved"), "no moved in vllm.module"),
        (seam("vllm.module:function", "a", "b"), "parameters are (a, b, *more, c, **rest), not (a, b)"),
        (seam("vllm.module:function", "b", "..."), "parameters are (a, ...), not (b, ...)"),
        (seam("vllm.module:Class.method", "self", "key", "new"), "parameters are (self, new, key)"),  # the order
        (seam("vllm.module:Class.method", "self", "old"), "parameters are (self, new, key)"),  # an overload
        (seam("vllm.module:Class", "field", "gone", "x"), "no gone, x in it"),
        (seam("vllm.module:CONSTANT", "field"), "no field in it"),
    ],
)
def test_the_checker_says_what_differs(sources, entry, says):
    assert says in check_seams.check(entry, sources)


def test_the_checker_fails_on_a_changed_signature(tmp_path, capsys):
    installed = check_seams.installed()
    for entry in SEAMS:
        module = Path(*entry.symbol.partition(":")[0].split("."))
        file = (
            module.with_suffix(".py") if (installed / module.with_suffix(".py")).is_file() else module / "__init__.py"
        )
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if (installed / file).is_file():
            shutil.copy(installed / file, tmp_path / file)
    shutil.copy(installed / "vllm" / "_version.py", tmp_path / "vllm" / "_version.py")
    assert check_seams.main([str(tmp_path)]) == 0
    resolver = tmp_path / "vllm" / "lora" / "resolver.py"
    changed = resolver.read_text().replace("base_model_name: str, lora_name: str", "lora_name: str")
    assert changed != resolver.read_text()
    resolver.write_text(changed)
    capsys.readouterr()
    assert check_seams.main([str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "differs" in line]
    assert "LoRAResolver.resolve_lora: parameters are (self, lora_name)" in line


def test_the_checker_reads_several_versions(sources, capsys):
    for number in ("1.0", "2.0"):
        one = sources / number
        shutil.copytree(sources / "vllm", one / "vllm")
        (one / f"vllm-{number}.dist-info").mkdir()
        (one / f"vllm-{number}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {number}\n")
    paths = [str(sources / number) for number in ("1.0", "2.0")]
    assert check_seams.main(paths, [seam("vllm.module:Class")]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["vllm 1.0", "vllm 2.0"]
    assert check_seams.main(paths, [seam("vllm.module:Gone")]) == 1


@pytest.mark.parametrize(("number", "says"), [("0.9.1", ""), ("0.10.0rc1", "no gone"), ("0.11.0", "no gone")])
def test_what_a_later_release_has_is_not_looked_for(sources, number, says):
    (sources / "vllm" / "_version.py").write_text(f"__version__ = version = '{number}'\n")
    assert says in check_seams.check(seam("vllm.module:gone", since="0.10"), sources)
    assert bool(says) == bool(check_seams.check(seam("vllm.module:gone", since="0.10"), sources))


def test_a_directory_without_vllm_is_no_success(tmp_path):
    with pytest.raises(SystemExit, match="no directory vllm"):
        check_seams.main([str(tmp_path)])
