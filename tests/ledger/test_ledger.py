"""The ledger against the installed vLLM's sources, and the checker that compares them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lora_plugins import ledger
from lora_plugins.ledger import PACKAGE, Patch, Symbol, entries, symbols
from tools import check_ledger

# --- the ledger

SYMBOLS = sorted({*symbols()}, key=lambda symbol: symbol.name)
ENTRIES = [(file, entry) for file, of_file in entries().items() for entry in of_file]


def test_the_installed_vllm_has_every_symbol():
    assert len(SYMBOLS) > 100
    installed = check_ledger.installed()
    assert {one.name: said for one in SYMBOLS if (said := check_ledger.check(one, installed))} == {}


def test_every_entry_says_what_why_and_how_to_remove():
    assert ENTRIES
    for file, entry in ENTRIES:
        assert all((entry.symbols, entry.what, entry.why, entry.since, entry.remove)), (file, entry)
        assert [*entry.parsed()], (file, entry)


def imported_from_vllm(file: Path) -> list[str]:
    imported = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    return imported


def test_whatever_a_file_imports_from_vllm_stands_in_its_ledger():
    found = 0
    for file in PACKAGE.rglob("*.py"):
        of_file = entries().get(file.relative_to(PACKAGE).as_posix(), ()) if (names := imported_from_vllm(file)) else ()
        noted = [f"{symbol.name.replace(':', '.')}." for entry in of_file for symbol in entry.parsed()]
        assert [name for name in names if not any(symbol.startswith(f"{name}.") for symbol in noted)] == [], file
        found += len(names)
    assert found > 10


def tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text())


def test_the_ledger_imports_only_the_standard_library():
    imported = {node.module for node in ast.walk(tree(ledger)) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree(ledger)) if isinstance(node, ast.Import) for name in node.names}
    assert imported - {"__future__"} <= sys.stdlib_module_names | {"collections.abc"}


def test_the_checker_runs_as_a_command_and_imports_no_vllm():
    tool = Path(check_ledger.__file__)
    script = (
        f"import runpy, sys; sys.argv = ['check_ledger.py']\n"
        f"try: runpy.run_path({str(tool)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  as noted  ") == len(symbols())
    assert "differs" not in done.stdout


# --- reading entries


def test_symbols_of_several_modules_are_read():
    entry = Patch(
        """
        vllm.one: function(a, b, ...)  name
        vllm.two:
            Class.method(self)  # since 0.31
            Class{
                first, second}
            nothing()  # until 0.33
        """,
        what="called",
        why="for a test",
        remove="never",
        since="0.32",
    )
    assert [*entry.parsed()] == [
        Symbol("vllm.one:function", ("a", "b", "..."), since="0.32"),
        Symbol("vllm.one:name", since="0.32"),
        Symbol("vllm.two:Class.method", ("self",), since="0.31"),
        Symbol("vllm.two:Class", attributes=("first", "second"), since="0.32"),
        Symbol("vllm.two:nothing", (), since="0.32", until="0.33"),
    ]


def test_a_symbol_in_another_form_is_refused():
    for text in ("vllm.one: function(a", "vllm.one: Class[a]", "vllm.one: a -> b", "vllm.one: a # 0.31"):
        with pytest.raises(ValueError, match="not a symbol in the ledger"):
            [*Patch(text, what=text, why="", remove="").parsed()]


def test_entries_are_read_without_importing_their_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "patch.py").write_text(
        "import no_such_module\nLEDGER = (\n    Patch('vllm.one: a', what='w', why='y' 'z', remove='r'),\n)\n"
    )
    (tmp_path / "other.py").write_text("LEDGERS = ()\n")
    assert entries(tmp_path) == {"folder/patch.py": [Patch("vllm.one: a", what="w", why="yz", remove="r")]}


# --- the checker


def symbol_of(text: str, since: str = "") -> Symbol:
    (found,) = Patch(text, what="", why="", remove="", since=since).parsed()
    return found


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


def test_the_checker_takes_what_is_there(sources):
    for text in (
        "vllm.module: function(a, b, *more, c, **rest)",
        "vllm.package: function(a, b, *more, c, **rest)",
        "vllm.module: function(a, b, ...)",
        "vllm.module: function(a, b, *more, c, **rest, ...)",
        "vllm.module: function",
        "vllm.module: Class",
        "vllm.module: Class{late, field, other, method}",
        "vllm.module: Class.method(self, new, key)",
        "vllm.module: Class.field",
        "vllm.module: CONSTANT",
        "vllm.module: Here",
    ):
        assert check_ledger.check(symbol_of(text), sources) == "", text


def test_the_checker_says_what_differs(sources):
    for text, says in (
        ("vllm.gone: x", "no module vllm.gone"),
        ("vllm.module: gone", "no gone in vllm.module"),
        ("vllm.module: Class.gone", "no Class.gone in vllm.module"),
        ("vllm.module: function.inner", "no function.inner"),
        ("vllm.module: moved", "no moved in vllm.module"),
        ("vllm.module: function(a, b)", "parameters are (a, b, *more, c, **rest), not (a, b)"),
        ("vllm.module: function()", "parameters are (a, b, *more, c, **rest), not ()"),
        ("vllm.module: function(b, ...)", "parameters are (a, ...), not (b, ...)"),
        ("vllm.module: Class(self)", "it is no function"),
        ("vllm.module: Class.method(self, key, new)", "parameters are (self, new, key)"),  # the order
        ("vllm.module: Class.method(self, old)", "parameters are (self, new, key)"),  # an overload
        ("vllm.module: Class{field, gone, x}", "no gone, x in it"),
        ("vllm.module: CONSTANT{field}", "no field in it"),
    ):
        assert says in check_ledger.check(symbol_of(text), sources), text


@pytest.mark.parametrize(
    ("number", "known"), [("0.9.1", "until 0.11"), ("0.10.0rc1", ""), ("0.11.0", ""), ("0.12.0", "since 0.10")]
)
def test_what_another_release_has_is_not_looked_for(sources, number, known):
    (sources / "vllm" / "_version.py").write_text(f"__version__ = version = '{number}'\n")
    for text in ("since 0.10", "until 0.11"):
        said = check_ledger.check(symbol_of(f"vllm.module: gone # {text}"), sources)
        assert ("no gone" in said) == (known in ("", text)), text
