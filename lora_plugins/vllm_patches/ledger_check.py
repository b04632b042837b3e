"""Hold the ledger of vLLM seams against vLLM's sources, without importing vLLM; see `ledger.SEAMS`."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lora_plugins.vllm_patches.ledger import Seam

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check(seam: Seam, sources: Path) -> str:
    """What differs from the ledger; empty where nothing does.

    A function must have exactly the parameters of `seam.has`, in order, or begin with them where it ends with "...";
    a class must have at least these attributes, and a name bound in another way (an import, a variable) none. What
    vLLM has only since a later release than the sources' is not looked for.
    """
    if _is_before(_release(sources), seam.since):
        return ""
    module, _, qualified = seam.symbol.partition(":")
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
    return _difference(node, seam.has)


def version(sources: Path) -> str:
    """What the sources call themselves."""
    release = _release(sources)
    return f"vllm {release}" if release else f"vllm in {sources}"


@functools.lru_cache(maxsize=8)
def _release(sources: Path) -> str:
    """Empty where the sources do not say."""
    for metadata in sorted(sources.glob("vllm*.dist-info/METADATA")):
        number = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if number:
            return number[1]
    file = sources / "vllm" / "_version.py"
    number = re.search(r"version = '([^']+)'", file.read_text(encoding="utf-8")) if file.is_file() else None
    return number[1] if number else ""


def _is_before(release: str, since: str) -> bool:
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:2]] for text in (release, since)]
    return bool(numbers[0]) and numbers[0] < numbers[1]


def installed() -> Path | None:
    """Where the installed vLLM's sources are, which are not imported; None where none is installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent.parent


@functools.lru_cache(maxsize=128)
def _parsed(file: Path, _mtime_ns: int) -> Sequence[ast.stmt]:
    """One file holds many seams."""
    text = file.read_text(encoding="utf-8")
    try:
        return ast.parse(text).body
    except SystemError:  # CPython 3.11 counts depth wrongly where a garbage collection comes between (gh-106905)
        return ast.parse(text).body


def _difference(node: ast.stmt | None, has: Sequence[str]) -> str:
    if isinstance(node, _FUNCTIONS):
        found = _parameters(node)
        if has and has[-1] == "...":
            found = [*found[: len(has) - 1], "..."]
        return "" if found == list(has) else f"parameters are ({', '.join(found)}), not ({', '.join(has)})"
    found = list(_attributes(node)) if isinstance(node, ast.ClassDef) else []
    missing = [name for name in has if name not in found]
    return f"no {', '.join(missing)} in it" if missing else ""


def _statements(scope: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of one scope, those inside `if`, `try` and `with` included."""
    for statement in scope:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that one statement binds in its scope."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _binding(scope: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement that binds `name`, which is the one that counts (earlier ones are overloads)."""
    found = None
    for statement in _statements(scope):
        if name in _names(statement):
            found = statement
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return names


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for statement in _statements(node.body):
        yield from _names(statement)
        if isinstance(statement, _FUNCTIONS):
            for part in ast.walk(statement):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value):
                    yield part.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
