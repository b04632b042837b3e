"""The ledger: every vLLM symbol that this package patches, subclasses, calls or relies on, beside our code.

A file that touches vLLM ends with a module-level `LEDGER`, a tuple of `Patch`es. `entries` reads the entries from the
files' source, because many files cannot be imported without vLLM or torch. `make ledger` compares the entries with the
installed vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent

_SYMBOL = re.compile(
    r"(?P<module>[\w.]+):|"
    r"(?P<name>[\w.]+)(?:\((?P<parameters>[^)]*)\)|\{(?P<attributes>[^}]*)\})?"
    r"(?:\s*# (?P<which>since|until) (?P<release>\d+\.\d+))?"
)


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
        symbols: `module:` followed by names in the module: `function(parameters)`, `Class{attributes}` or a name alone,
            each perhaps with `# since 0.31` or `# until 0.30`; then perhaps further modules.
        what: our use of the symbols. why: the purpose.
        remove: the change upstream after which the entry can go; most entries share a change.
        since: the first vLLM version with the symbols, where a symbol has no version of its own.
    """

    symbols: str
    what: str
    why: str
    remove: str = "vLLM's scheduler plans adapters itself"
    since: str = "0.30"

    def parsed(self) -> Iterator[Symbol]:
        """Yield the symbols one by one.

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
            attributes = _names(found["attributes"] or "")
            release = {found["which"]: found["release"]} if found["which"] else {}
            yield Symbol(f"{module}:{found['name']}", parameters, attributes, **{"since": self.since, **release})


# By `ast`, without import: the ledger is also read where vLLM and torch are missing.
def entries(package: Path = PACKAGE) -> Mapping[str, Sequence[Patch]]:
    """Return every entry, by the path of its file within the package; nothing is imported."""
    found: dict[str, Sequence[Patch]] = {}
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        # Only files with a ledger are parsed: parsing takes time.
        if "\nLEDGER = (" in text:
            found[file.relative_to(package).as_posix()] = [*_in(parse(text))]
    return found


def symbols(package: Path = PACKAGE) -> list[Symbol]:
    """Return the symbols of all entries."""
    return [symbol for of_file in entries(package).values() for entry in of_file for symbol in entry.parsed()]


def parse(text: str) -> list[ast.stmt]:
    """Return the statements of a module's source."""
    try:
        return ast.parse(text).body
    # CPython 3.11 counts depth wrongly where a garbage collection comes between (gh-106905); a second try succeeds.
    except SystemError:
        return ast.parse(text).body


def _in(module: Sequence[ast.stmt]) -> Iterator[Patch]:
    for statement in module:
        match statement:
            case ast.Assign(targets=[ast.Name(id="LEDGER")], value=ast.Tuple(elts=calls)):
                for call in calls:
                    yield _entry(call)


def _entry(call: ast.expr) -> Patch:
    if not isinstance(call, ast.Call):
        raise TypeError(f"no entry of the ledger: {ast.unparse(call)}")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    return Patch(*map(ast.literal_eval, call.args), **named)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))
