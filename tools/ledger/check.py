"""Compares an entry of the ledger with vLLM's sources, without importing vLLM; see `tools.ledger`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lora_plugins.vllm_patches.vllm_sources import release_of
from tools.ledger import FUNCTIONS, Symbol, parameters_of, parse


def check(symbol: Symbol, sources: Path) -> str:
    """Return the difference from the ledger; empty where the sources agree.

    A function must have exactly the noted parameters, in order, or begin with them where they end with "..."; a class
    must have at least the noted attributes. A symbol that the release lacks by `since` or `until` is not looked for.
    """
    # The code that uses a symbol of some releases tests for the symbol at run time.
    release = release_of(sources)
    if is_before(release, symbol.since) or (symbol.until and is_before(symbol.until, release)):
        return ""
    module, _, qualified = symbol.name.partition(":")
    path = sources.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return f"no module {module}"
    scope: Sequence[ast.stmt] = _parsed(file, file.stat().st_mtime_ns)
    node: ast.stmt | None = None
    done = []
    for name in qualified.split("."):
        done.append(name)
        node = _binding(scope, name)
        if node is None:
            return f"no {'.'.join(done)} in {module}"
        scope = node.body if isinstance(node, ast.ClassDef) else []
    return _difference(node, symbol)


def is_before(release: str, since: str) -> bool:
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:2]] for text in (release, since)]
    return all(numbers) and numbers[0] < numbers[1]


@functools.lru_cache(maxsize=128)
def _parsed(file: Path, _mtime_ns: int) -> Sequence[ast.stmt]:
    """Return the statements of a file; cached, because a file holds many symbols."""
    return parse(file.read_text(encoding="utf-8")).body


def _difference(node: ast.stmt | None, symbol: Symbol) -> str:
    if symbol.parameters is not None:
        if not isinstance(node, FUNCTIONS):
            return "it is no function"
        found, wanted = parameters_of(node), list(symbol.parameters)
        if wanted and wanted[-1] == "...":
            found = [*found[: len(wanted) - 1], "..."]
        return "" if found == wanted else f"parameters are ({', '.join(found)}), not ({', '.join(wanted)})"
    attributes = _attributes(node) if isinstance(node, ast.ClassDef) else frozenset()
    missing = [name for name in symbol.attributes if name not in attributes]
    return f"no {', '.join(missing)} in it" if missing else ""


def _statements(scope: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, including statements inside `if`, `try` and `with`."""
    for statement in scope:
        yield statement
        if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds in its scope."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _binding(scope: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """Return the last statement that binds `name`: the last binding counts, and earlier ones are overloads."""
    found = None
    for statement in _statements(scope):
        if name in _names(statement):
            found = statement
    return found


@functools.lru_cache(maxsize=128)
def _attributes(node: ast.ClassDef) -> frozenset[str]:
    """Return a class's attributes; cached, because a class has several entries."""
    found: set[str] = set()
    for statement in _statements(node.body):
        found.update(_names(statement))
        if isinstance(statement, FUNCTIONS):
            # Attributes set on `self` in any method count, as Python has no list of them.
            found.update(
                part.attr
                for part in ast.walk(statement)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value)
            )
    return frozenset(found)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
