"""Where we touch vLLM: the ledger against the installed sources, errors as vLLM answers them, its builtins' names."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lora_plugins import engine, ledger
from lora_plugins.engine import http_error
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.ledger import SEAMS, Seam
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
    for file in Path(engine.__file__).parent.rglob("*.py"):
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


def test_the_engine_module_holds_what_touches_vllm_and_no_more():
    nodes = list(ast.walk(tree(engine)))
    ours = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and "lora_plugins" in node.module]
    assert ours == ["lora_plugins.errors"]
    assert not [node for node in nodes if isinstance(node, ast.ClassDef)]
    for function in [node for node in tree(engine).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        touches = ast.unparse(function)
        assert "from vllm" in touches or "import_module" in touches, f"{function.name} touches no vLLM"


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


# --- errors


def test_not_found_is_vllms_404():
    from vllm.exceptions import VLLMNotFoundError

    error = http_error(AdapterNotFound("x", adapter="sql"))
    assert isinstance(error, VLLMNotFoundError)
    assert str(error) == "[L002] adapter 'sql': found x."


@pytest.mark.parametrize("kind", [IncompatibleAdapter, InvalidAdapter])
def test_a_refused_adapter_is_vllms_400(kind):
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    error = http_error(kind("x", adapter="sql"))
    assert isinstance(error, VLLMClientError)
    assert not isinstance(error, VLLMNotFoundError)
    assert str(error) == f"[{kind.code}] adapter 'sql': found x."


@pytest.mark.parametrize(("kind", "status"), [(SourceUnavailable, 503), (NoFreeSlot, 503), (OutOfMemory, 507)])
def test_what_is_nobodys_fault_keeps_its_status_and_says_when_to_try_again(kind, status):
    from fastapi import HTTPException

    error = http_error(kind("x"))
    assert isinstance(error, HTTPException)
    assert (error.status_code, error.detail) == (status, f"[{kind.code}] found x.")
    expected = {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}
    assert error.headers == expected
    assert bool(expected) == (status == 503)


@pytest.fixture
def answered(monkeypatch):
    """A function from one of our errors to the response of an application with vLLM's own exception handlers."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling import register

    monkeypatch.setattr(register, "http_exception_handler", register.http_exception_handler)  # put back afterwards
    engine.keep_http_headers()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    register.init_exception_handler(app)
    errors: list[LoRAPluginsError] = []

    @app.get("/")
    def route():
        raise http_error(errors.pop())

    def answer(error: LoRAPluginsError):
        errors.append(error)
        return TestClient(app, raise_server_exceptions=False).get("/")

    return answer


@pytest.mark.parametrize(
    ("kind", "status", "retry"),
    [
        (AdapterNotFound, 404, None),
        (IncompatibleAdapter, 400, None),
        (InvalidAdapter, 400, None),
        (SourceUnavailable, 503, "5"),
        (NoFreeSlot, 503, "1"),
        (OutOfMemory, 507, None),
    ],
)
def test_vllms_handlers_answer_with_our_status_text_and_headers(answered, kind, status, retry):
    response = answered(kind("x\ud800", adapter="sql", remedy="copy it"))
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry)
    message = response.json()["error"]["message"]
    for part in (f"[{kind.code}]", "'sql'", "copy it"):
        assert part in message


# --- the builtins' names


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("a_builtin_of_vllm")
    module.register = lambda: "builtin"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(engine, "_builtins", {})
    return module


def test_a_builtin_that_was_taken_over_can_still_be_called(module):
    assert engine.builtin(module.__name__, "register")() == "builtin"
    engine.take_over(module.__name__, "register", lambda: "ours")
    assert module.register() == "ours"
    assert engine.builtin(module.__name__, "register")() == "builtin"


def test_taken_over_twice_the_builtin_is_still_the_builtin(module):
    for _ in range(2):
        engine.take_over(module.__name__, "register", lambda: "ours")
    assert engine.builtin(module.__name__, "register")() == "builtin"
