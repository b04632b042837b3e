"""The ledger: every vLLM symbol that this package patches, subclasses, calls or relies on, beside our code.

An import from vLLM and a call of `wrap` say what they touch; a wrapper's parameters after the first are those that its
original must have. The docstring of the wrapper, or of code around the call, has the rest, each with its continuation
indented:

    Touches: what no import and no `wrap` says, such as attributes and called methods, in the form of `Patch.symbols`.
    Why: the purpose.
    Until: the change upstream after which the code can go; without this line, the change that most entries wait for.

`entries` reads sources without importing them: many files cannot be imported without vLLM or torch. `make ledger`
compares the entries with the installed vLLM.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lora_plugins"

_SYMBOL = re.compile(
    r"(?P<module>[\w.]+):|"
    r"(?P<name>[\w.]+)(?:\((?P<parameters>[^)]*)\)|\{(?P<members>[^}]*)\})?"
    r"(?:\s*# (?P<which>since|until) (?P<release>\d+\.\d+))?"
)

_METHOD = re.compile(r"(\w+)\(([^)]*)\)")  # among the members of a class
_SECTION = re.compile(r"^(Touches|Why|Until):", re.MULTILINE)
_TOUCHES_VLLM = re.compile(r"^\s*(?:from vllm[. ]|wrap\(|Touches:|Why:|Until:)", re.MULTILINE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Documented = ast.Module | ast.ClassDef | _Function


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of vLLM, and the form that vLLM must have.

    Attributes:
        name: `module:qualified.name`.
        parameters: of a function, in order, "..." for any further ones; None for anything else.
        attributes: of a class, fields included.
        since: the first vLLM version with the symbol in this form. until: the last; empty where none is known.
    """

    name: str
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()
    since: str = "0.30"
    until: str = ""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change of vLLM, or a use of vLLM.

    Attributes:
        symbols: `module:` followed by names in the module: `function(parameters)`, `Class.method(parameters)`,
            `Class{attribute, method(parameters)}` or a name alone, each perhaps with `# since 0.31` or `# until 0.30`;
            then perhaps further modules.
        what: our use of the symbols. why: the purpose.
        remove: the change upstream after which the entry can go; most entries share a change.
        derived: the symbols that the code itself says.
    """

    symbols: str
    what: str
    why: str
    remove: str = "vLLM's scheduler plans adapters itself"
    derived: tuple[Symbol, ...] = ()

    def parsed(self) -> Iterator[Symbol]:
        """Yield the symbols one by one, those of the text first.

        Raises:
            ValueError: `symbols` has a part in another form.
        """
        # Everything that no symbol matches is left over: a typing error must not drop a symbol from the ledger.
        if rest := _SYMBOL.sub("", self.symbols).strip():
            raise ValueError(f"not a symbol in the ledger: {rest!r} in {self.symbols!r}")
        module = ""
        for found in _SYMBOL.finditer(self.symbols):
            if found["module"]:
                module = found["module"]
                continue
            parameters = None if found["parameters"] is None else _names(found["parameters"])
            release = {found["which"]: found["release"]} if found["which"] else {}
            name, members = f"{module}:{found['name']}", found["members"] or ""
            methods = _METHOD.findall(members)
            if (attributes := _names(_METHOD.sub("", members))) or not methods:
                yield Symbol(name, parameters, attributes, **release)
            for method, of_method in methods:
                yield Symbol(f"{name}.{method}", _names(of_method), (), **release)
        yield from self.derived


# By `ast`, without import: the ledger is also read where vLLM and torch are missing.
def entries(package: Path = PACKAGE) -> Mapping[str, Sequence[Patch]]:
    """Return every entry, by the path of its file within the package; nothing is imported."""
    found: dict[str, Sequence[Patch]] = {}
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        # Only files that touch vLLM are parsed: parsing takes time.
        if _TOUCHES_VLLM.search(text):
            try:
                of_file = [*_Module(parse(text)).entries()]
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
            if of_file:
                found[file.relative_to(package).as_posix()] = of_file
    return found


@functools.cache
def symbols(package: Path = PACKAGE) -> Sequence[Symbol]:
    """Return the symbols of all entries, as the package was at the first call."""
    return [symbol for of_file in entries(package).values() for entry in of_file for symbol in entry.parsed()]


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a module's source."""
    try:
        return ast.parse(text)
    # CPython 3.11 counts depth wrongly where a garbage collection comes between (gh-106905); a second try succeeds.
    except SystemError:
        return ast.parse(text)


def parameters_of(function: _Function) -> list[str]:
    """Return the names of a function's parameters, in order."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return names


class _Module:
    """A module of ours: its docstrings with a `Why:`, and the places that its imports and wrappers touch.

    Raises:
        ValueError: no docstring says why code touches vLLM; or `wrap` has a name that the code computes, and there is
            no `Touches:`.
    """

    def __init__(self, module: ast.Module) -> None:
        nodes = [*ast.walk(module)]
        self._functions = {node.name: node for node in nodes if isinstance(node, FUNCTIONS)}
        self._imported = {one.asname or one.name: name for node in nodes for one, name in _from_vllm(node)}
        self._sections = {node: found for node in nodes if isinstance(node, _Documented) and (found := _sections(node))}
        self._derived: dict[_Documented, list[Symbol]] = {node: [] for node in self._sections}
        self._visit(module, None)

    def entries(self) -> Iterator[Patch]:
        """Yield the entries; a place that another names more exactly is left out."""
        patches = {
            node: Patch(found.get("Touches", ""), (ast.get_docstring(node) or "").partition("\n")[0], found["Why"])
            for node, found in self._sections.items()
        }
        declared = {_dotted(symbol) for patch in patches.values() for symbol in patch.parsed()}
        exact = declared.union(_dotted(symbol) for found in self._derived.values() for symbol in found)
        said: set[Symbol] = set()
        for node, patch in patches.items():
            derived = tuple(
                symbol
                for symbol in dict.fromkeys(self._derived[node])
                if symbol not in said
                and (name := _dotted(symbol)) not in declared
                and not any(one.startswith(f"{name}.") for one in exact)
            )
            said.update(derived)
            yield replace(patch, derived=derived, remove=self._sections[node].get("Until", patch.remove))

    def _visit(self, node: ast.AST, around: _Documented | None) -> None:
        """Collect the places below a node; their entry is the docstring `around` them, or the one of a wrapper."""
        if isinstance(node, _Documented) and node in self._sections:
            around = node
        for _, name in _from_vllm(node):
            # An import without a reason of its own is for one of the module's entries.
            self._note(Symbol(name), around or next(iter(self._sections), None))
        match node:
            case ast.Call(func=ast.Name("wrap"), args=[owner, attribute, wrapper]):
                self._note_wrapped(owner, attribute, wrapper, around)
        for child in ast.iter_child_nodes(node):
            self._visit(child, around)

    def _note_wrapped(
        self, owner: ast.expr, attribute: ast.expr, wrapper: ast.expr, around: _Documented | None
    ) -> None:
        # What a lambda calls is no wrapper.
        parts = [] if isinstance(wrapper, ast.Lambda) else [*ast.walk(wrapper)]
        named = [part.id for part in parts if isinstance(part, ast.Name) and part.id in self._functions]
        function = self._functions[named[0]] if named else None
        bound = {part.arg for part in parts if isinstance(part, ast.keyword)}  # of a `partial`
        entry = function if function in self._sections else around
        match attribute:
            case ast.Constant(str(name)) if place := self._place(owner):
                self._note(Symbol(f"{place}{name}", _taken(function, bound) if function else None), entry)
            case _ if entry is None or "Touches" not in self._sections[entry]:
                raise ValueError(f"no `Touches:` says what is wrapped: {ast.unparse(owner)}, {ast.unparse(attribute)}")

    def _note(self, symbol: Symbol, entry: _Documented | None) -> None:
        if entry is None:
            raise ValueError(f"no docstring says `Why:` of {symbol.name}")
        self._derived[entry].append(symbol)

    def _place(self, owner: ast.expr) -> str:
        """Return where the attributes of a class or module of vLLM are, up to their own name; empty for another's."""
        match owner:
            case ast.Name(name) if place := self._imported.get(name):
                is_class = place.rpartition(":")[2].lstrip("_")[:1].isupper()
                return f"{place}." if is_class else f"{place.replace(':', '.')}:"
            case ast.Attribute(value, name) if place := self._place(value):
                return f"{place}{name}."
        return ""


def _taken(wrapper: _Function, bound: set[str | None]) -> tuple[str, ...]:
    """Return a wrapper's parameters after the original, "..." for what it passes on unread; without bound options."""
    _, *parameters = (name for name in parameters_of(wrapper) if name not in bound)
    read = [*itertools.takewhile(lambda name: not name.startswith("*"), parameters)]
    return (*read, *(["..."] if len(read) < len(parameters) else []))


def _from_vllm(node: ast.AST) -> Iterator[tuple[ast.alias, str]]:
    """Yield what an import takes from vLLM, with its place."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        yield from ((one, f"{node.module}:{one.name}") for one in node.names)


def _dotted(symbol: Symbol) -> str:
    return symbol.name.replace(":", ".")


def _sections(node: _Documented) -> dict[str, str]:
    """Return the ledger's sections of a docstring: each ends at the next, or at an empty line."""
    _, *parts = _SECTION.split(ast.get_docstring(node) or "")
    texts = (" ".join(text.partition("\n\n")[0].split()) for text in parts[1::2])
    found = dict(zip(parts[::2], texts, strict=True))
    if found and not found.get("Why"):
        raise ValueError(f"a docstring has {', '.join(found)} and no `Why:`")
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))
