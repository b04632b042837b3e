"""The ledger against the installed vLLM's sources, and the checker that compares them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tools import check_ledger, ledger
from tools.ledger import PACKAGE, Patch, Symbol, entries, symbols

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
        assert all((entry.what, entry.why, entry.remove)), (file, entry)
        assert [*entry.parsed()], (file, entry)


def test_every_place_is_looked_for():
    # A checker that always agrees would agree here too: no other name, and no other parameters, may pass.
    installed = check_ledger.installed()
    release = check_ledger.version(installed).removeprefix("vllm ")
    looked_for = [one for one in SYMBOLS if one.since <= release and (not one.until or release < one.until)]
    assert len(looked_for) > 0.9 * len(SYMBOLS)
    for one in looked_for:
        assert check_ledger.check(replace(one, name=f"{one.name}_of_no_release"), installed), one
        if one.parameters not in (None, ("...",)):
            assert check_ledger.check(replace(one, parameters=("of_no_release", *one.parameters)), installed), one
        if one.attributes:
            assert check_ledger.check(replace(one, attributes=(*one.attributes, "of_no_release")), installed), one


def imported_from_vllm(file: Path) -> list[str]:
    imported = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
    return imported


def test_whatever_a_file_imports_from_vllm_stands_in_its_ledger():
    found, of_files = 0, entries()
    for file in PACKAGE.rglob("*.py"):
        names, of_file = imported_from_vllm(file), of_files.get(file.relative_to(PACKAGE).as_posix(), ())
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


def read(folder: Path, text: str) -> list[tuple[str, str, str, list[tuple[str, tuple[str, ...] | None]]]]:
    """What, why, removal and places of each entry in a module of this text."""
    (folder / "ours.py").write_text(text)
    found = entries(folder)["ours.py"]
    return [
        (one.what, one.why, one.remove, [(symbol.name, symbol.parameters) for symbol in one.parsed()]) for one in found
    ]


OURS = """
'''Of the module.

More of it.

Touches:
    vllm.one: Called{attribute, method(self, x),
        other()}
Why: the module has
    a purpose.
Until: never.
'''
import vllm_of_another_package
from vllm.one import Called, Imported
def patch():
    from vllm import module
    from vllm.one import Imported
    from vllm.two import Wrapped as Ours
    wrap(Ours, "method", _method)
    wrap(Ours, "with_option", partial(_with_option, option=2))
    wrap(module.Inner, "whole", _whole, only=_is_ours)
    wrap(module, "unread", lambda original, one: _method(original, one))
def _is_ours(one): ...
async def _method(original, self, a, *args, **kwargs):
    '''Of the wrapper.

    Why: it wraps.

    Raises:
        ValueError: sometimes.
    '''
def _with_option(original, *, key, option): ...
async def _whole(original, self, a, b=1): ...
"""


def test_code_says_what_it_touches(tmp_path):
    of_module = [
        ("vllm.one:Called", None),
        ("vllm.one:Called.method", ("self", "x")),
        ("vllm.one:Called.other", ()),
        ("vllm.one:Imported", None),
        ("vllm.two:Wrapped.with_option", ("key",)),
        ("vllm.module:Inner.whole", ("self", "a", "b")),
        ("vllm.module:unread", None),
    ]
    assert read(tmp_path, OURS) == [
        ("Of the module.", "the module has a purpose.", "never.", of_module),
        (
            "Of the wrapper.",
            "it wraps.",
            "vLLM's scheduler plans adapters itself",
            [("vllm.two:Wrapped.method", ("self", "a", "..."))],
        ),
    ]


def test_what_a_docstring_says_more_exactly_is_not_said_twice(tmp_path):
    text = "'''X.\n\nTouches: vllm.one: A(x) # since 0.33\n    vllm.two: B\nWhy: y\n'''\n"
    text += "from vllm.one import A\nfrom vllm.two import B\nwrap(A, 'f', lambda original: original)\n"
    ((*_, places),) = read(tmp_path, text)
    assert places == [("vllm.one:A", ("x",)), ("vllm.two:B", None), ("vllm.one:A.f", None)]


WHY = "'''X.\n\nWhy: y\n'''\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("from vllm import envs\n", "no docstring says `Why:` of vllm:envs"),
        (f"def f():\n    {WHY}wrap(vllm.A, 'f', g)\n", "no `Touches:` says what is wrapped: vllm.A, 'f'"),
        (f"{WHY}from vllm import A\nwrap(A, name, g)\n", "no `Touches:` says what is wrapped: A, name"),
        (f"{WHY}def g():\n    {WHY.replace('Why', 'Until')}", "a docstring has Until and no `Why:`"),
        ("wrap(vllm.A, 'f', g)\n", "no `Touches:` says what is wrapped: vllm.A, 'f'"),
        *(
            (f"'''X.\n\nTouches: vllm.one: {symbol}\nWhy: y\n'''\n", "not a symbol in the ledger")
            for symbol in ("a -> b", "function(a", "Class[a]", "a # 0.31")
        ),
    ],
)
def test_code_without_its_reason_is_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read(tmp_path, text)


def test_symbols_of_several_modules_are_read():
    entry = Patch(
        """
        vllm.one: function(a, b, ...)  name
        vllm.two:
            Class.method(self)  # since 0.31
            Class{
                first, other(self, a), second, last()}
            nothing()  # until 0.33
        """,
        what="called",
        why="for a test",
        remove="never",
    )
    assert [*entry.parsed()] == [
        Symbol("vllm.one:function", ("a", "b", "...")),
        Symbol("vllm.one:name"),
        Symbol("vllm.two:Class.method", ("self",), since="0.31"),
        Symbol("vllm.two:Class", attributes=("first", "second")),
        Symbol("vllm.two:Class.other", ("self", "a")),
        Symbol("vllm.two:Class.last", ()),
        Symbol("vllm.two:nothing", (), until="0.33"),
    ]


def test_entries_are_read_without_importing_their_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "patch.py").write_text("'''W.\n\nTouches: vllm.one: a\nWhy: y\n'''\nimport no_such_module\n")
    (tmp_path / "other.py").write_text("from vllmish import Touches\n")
    assert entries(tmp_path) == {"folder/patch.py": [Patch("vllm.one: a", what="W.", why="y")]}


# --- the checker


def symbol_of(text: str) -> Symbol:
    (found,) = Patch(text, what="", why="", remove="").parsed()
    return found if "# since" in text else replace(found, since="")


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


def test_the_checker_looks_for_what_code_says(sources, tmp_path):
    text = f"{WHY}from vllm import module\nfrom vllm.module import Class\n"
    text += "def _method(original, self, new, *args): ...\n"
    text += "wrap(Class, 'method', _method)\nwrap(module.Class, 'method', _method)\n"
    for before, after, says in (
        ("", "", ""),
        ("import Class", "import Class, CONSTANT", ""),
        ("import module", "import module, package", "no package in vllm"),
        ("import Class", "import Class, gone", "no gone in vllm.module"),
        ("(Class, 'method'", "(Class, 'renamed'", "no Class.renamed in vllm.module"),
        ("module.Class, 'method'", "module.Gone, 'method'", "no Gone in vllm.module"),
        ("import module", "import gone as module", "no module vllm.gone"),
        ("self, new", "self, old", "parameters are (self, new, ...), not (self, old, ...)"),
    ):
        folder = tmp_path / f"with {after}"
        folder.mkdir()
        (folder / "patch.py").write_text(text.replace(before, after))
        said = [check_ledger.check(symbol, sources) for symbol in symbols(folder)]
        assert says in "; ".join(said), after
        assert any(said) == bool(says), after


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
