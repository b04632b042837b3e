"""Errors: each says what, where and what to do; they survive a process boundary, and any text."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import pickle
import pkgutil
import sys
import typing
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lora_plugins
from lora_plugins import errors
from lora_plugins.errors import KINDS, ErrorKind, InvalidAdapter, LoRAPluginsError, describing, is_remembered, kind_of
from lora_plugins.resolvers.admission import LookUpsBusy
from lora_plugins.resolvers.sources.remote_failures import BrokenAnswer, kind_of_type
from lora_plugins.store.disk_errors import DamagedCopy

TABLE = {
    errors.NoFreeSlot: ("L001", RuntimeError, 503),
    errors.AdapterNotFound: ("L002", FileNotFoundError, 404),
    errors.IncompatibleAdapter: ("L003", ValueError, 400),
    errors.OutOfMemory: ("L004", MemoryError, 507),
    errors.InvalidAdapter: ("L005", ValueError, 400),
    errors.SourceUnavailable: ("L006", ConnectionError, 503),
    errors.InvalidSettings: ("L007", ValueError, 500),
    errors.NotAllowed: ("L008", PermissionError, 403),
    errors.ReplicaLost: ("L009", ConnectionError, 503),
    errors.VersionMismatch: ("L010", RuntimeError, 412),
    errors.PushSuperseded: ("L011", RuntimeError, 409),
    errors.SlowBody: ("L012", TimeoutError, 408),
    errors.RateExceeded: ("L013", RuntimeError, 429),
}
FIELDS = {"found": "7 bytes", "expected": "8 bytes", "remedy": "copy it"}
FIELDS |= {"adapter": "team/sql", "file": "x.json", "place": "/a"}


def subclasses(kind: type[LoRAPluginsError]) -> Iterator[type[LoRAPluginsError]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def test_table_has_every_error_of_the_package():
    ours = {kind for kind in subclasses(LoRAPluginsError) if kind.__module__.startswith("lora_plugins")}
    public = {kind for kind in ours if kind.__module__ == "lora_plugins.errors"}
    assert public == set(TABLE)
    assert {kind.__name__ for kind in public} <= set(lora_plugins.__all__)
    # A source's subclass keeps the code and status of the error that it refines.
    assert all(
        (kind.code, kind.http_status) == (kind.__base__.code, kind.__base__.http_status) for kind in ours - public
    )


@pytest.fixture(scope="module")
def every_error() -> list[type[LoRAPluginsError]]:
    """Those of every module of the package, as no other way finds those that are raised in one place only."""
    for module in pkgutil.walk_packages(lora_plugins.__path__, "lora_plugins."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [kind for kind in subclasses(LoRAPluginsError) if kind.__module__.startswith("lora_plugins.")]


def test_each_error_is_of_one_kind(every_error):
    assert {"LookUpsBusy", "FetchesBusy", "DamagedCopy", "VersionChanged"} <= {error.__name__ for error in every_error}
    assert set(KINDS) == set(TABLE), "the tree's own classes, of which all others are"
    for error in every_error:
        assert len(set(error.__mro__) & set(KINDS)) == 1, error


# What is no error of ours where adapters are found, stored and read, and never leaves there.
INTERNAL = {
    "_BytesRefused": "the verdict in it is remembered, and raised",
    "Lost": "where all processes are, its error is raised",
    "Stopped": "a fetch that was cancelled",
    "_DiskError": "the error in it is raised",
    "TypeError": "no manifest, which is damage; a source that is given another's adapter",
    "ValueError": "more bytes than a range has",
    "AssertionError": "unreachable",
}


def raised_types(module: ModuleType) -> Iterator[type[BaseException]]:
    """The classes of its `raise`s, and of what its functions make for them; a local variable's is raised elsewhere."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Raise):
            continue
        name = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        found = getattr(module, name.id, getattr(builtins, name.id, None)) if isinstance(name, ast.Name) else None
        made = typing.get_type_hints(found)["return"] if inspect.isfunction(found) else found
        if inspect.isclass(made) and made is not Exception:  # what the Hub's table makes, see its own test
            yield made


def test_what_sources_store_and_reading_raise_is_of_a_kind(every_error):
    """Each is one of ours, or in the table of a source's exceptions."""
    folders = tuple(f"lora_plugins.{name}." for name in ("resolvers", "store", "verification"))
    modules = [module for name, module in sys.modules.items() if name.startswith(folders)]
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == module.__name__
    }
    raised = defined.union(*(raised_types(module) for module in modules))
    assert {LookUpsBusy, DamagedCopy, BrokenAnswer, EOFError, errors.InvalidSettings} <= raised
    internal = {it for it in raised if not issubclass(it, LoRAPluginsError) and kind_of_type(it) is None}
    assert {it.__name__ for it in internal} == set(INTERNAL)


def test_another_packages_error_is_a_fault():
    class New(LoRAPluginsError):
        pass

    assert kind_of(New("x")) is ErrorKind.FAULT


def test_no_status_contradicts_its_kind(every_error):
    """A fault is never the client's, and nothing that holds until the adapter changes asks for a second try."""
    for error in every_error:
        match kind_of(error("x")):
            case ErrorKind.FAULT:
                assert error.http_status in (503, 507), error
                assert (error.http_status == 503) == (error.retry_after_s is not None), error
            case ErrorKind.VERDICT:
                assert (error.http_status, error.retry_after_s) == (400, None), error
            case ErrorKind.ABSENCE:
                assert (error.http_status, error.retry_after_s) == (404, None), error
            case ErrorKind.REFUSAL:
                assert error.http_status in (403, 408, 409, 412, 429, 500), error
                assert error.retry_after_s is None, error


def test_only_faults_are_remembered_for_a_moment(every_error):
    remembered = {error.__name__ for error in every_error if is_remembered(error("x"))}
    assert {"SourceUnavailable", "DamagedCopy", "OutOfMemory"} <= remembered
    assert not remembered & {"LookUpsBusy", "FetchesBusy", "VersionChanged", "NoFreeSlot"}, "of one request"
    assert all(kind_of(error("x")) is ErrorKind.FAULT for error in every_error if is_remembered(error("x")))


def test_code_builtin_base_and_status_are_those_of_the_docstring():
    for kind, (code, builtin, status) in TABLE.items():
        assert (kind.code, kind.http_status) == (code, status), kind
        assert issubclass(kind, builtin), kind
        assert issubclass(kind, LoRAPluginsError), kind
        (line,) = [line for line in errors.__doc__.splitlines() if kind.__name__ in line]
        assert code in line, "the module's docstring lists each"
        assert builtin.__name__ in line, kind


def test_text_has_code_adapter_file_found_expected_and_remedy():
    for kind in TABLE:
        assert str(kind(**FIELDS)) == (
            f"[{kind.code}] adapter 'team/sql', file 'x.json': found 7 bytes at /a; expected 8 bytes. To fix: copy it."
        )


def test_text_omits_unknown_parts():
    assert str(InvalidAdapter("7 bytes")) == "[L005] found 7 bytes."
    assert str(InvalidAdapter("7 bytes", file="x")) == "[L005] file 'x': found 7 bytes."


def test_pickling_keeps_everything():
    for kind in TABLE:
        error = kind(**FIELDS)
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is kind
        assert vars(copied) == vars(error) == FIELDS, kind
        assert str(copied) == str(error)


@given(st.text(), st.text())
def test_untrusted_text_forges_no_log_line_and_breaks_no_response(found, name):
    # Tensor names and configuration values are untrusted; half a surrogate pair would break vLLM's JSON response.
    text = str(InvalidAdapter(found, adapter=name))
    assert text.isprintable()
    json.dumps(text, ensure_ascii=False).encode()


def test_text_of_other_languages_stays_readable():
    assert "größe 模型" in str(InvalidAdapter("größe 模型"))


def test_describing_fills_in_what_is_missing_and_keeps_the_innermost():
    with pytest.raises(InvalidAdapter) as caught, describing(adapter="sql", file="outer"), describing(file="inner"):
        raise InvalidAdapter("x")
    assert (caught.value.adapter, caught.value.file) == ("sql", "inner")


def test_describing_ignores_other_errors():
    with pytest.raises(KeyError) as caught, describing(adapter="sql"):
        raise KeyError("x")
    assert not hasattr(caught.value, "adapter")
