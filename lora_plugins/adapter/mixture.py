"""The grammar of mixtures: names of sums of adapters, such as `sql*0.7+style*-0.3`, and `sql*0.5` for half a strength.

```
mixture = term *( "+" term )              at most 8 terms, of different parts
term    = part "*" weight
weight  = [ "-" ] digits [ "." digits ]   not 0; at most 4 digits before the point and 6 after
```
A part is an adapter's name, with a revision or digest or without. A text whose terms are so is a mixture, always: an
adapter of that name cannot be asked for. Two texts of one sum are one mixture, whose name is the canonical text: parts
in order, weights without needless zeros.

Pure functions of texts, called by `names.py` in the API server and on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_PARTS = 8
_MAX_DIGITS = (4, 6)  # before and after the point
_WEIGHT = re.compile(r"\*(-?[0-9]+(?:\.[0-9]+)?)(?:\+|\Z)")


class Term(NamedTuple):
    """A part of a mixture, and its weight in the shortest form."""

    name: str
    weight: str

    def __str__(self) -> str:
        return f"{self.name}*{self.weight}"


def terms_of(text: str) -> tuple[Term, ...] | None:
    """Return the terms of a mixture in canonical order; None for a name, and none for a mixture with a fault."""
    if "*" not in text:
        return None
    if (terms := _terms(text)) is not None:
        return () if _fault_of(terms) else tuple(sorted(terms))
    # A version of a mixture is not a name either: its path would be compared with patterns as a whole.
    return () if _is_mixture(text) else None


def canonical(text: str) -> str:
    """Return the name under which a mixture is served; a text without terms, or with a fault, as it is."""
    return "+".join(map(str, terms_of(text) or ())) or text


def fault_in(text: str) -> tuple[str, str]:
    """Return what a mixture without `terms_of` has, and what was expected."""
    return _fault_of(_terms(text) or []) or ("a revision of a mixture", "revisions of its parts")


def _fault_of(terms: Sequence[Term]) -> tuple[str, str] | None:
    names = [term.name for term in terms]
    if len(terms) > MAX_PARTS:
        return f"a mixture of {len(terms)} parts", f"at most {MAX_PARTS}"
    for term in terms:
        digits = [len(part) for part in term.weight.lstrip("-").split(".")]
        if term.weight in ("0", "-0"):
            return f"the weight 0 of '{term.name}'", "another weight, or the mixture without this part"
        if any(count > most for count, most in zip(digits, _MAX_DIGITS, strict=False)):
            found = f"a weight of '{term.name}' with {max(digits)} digits"
            return found, f"at most {_MAX_DIGITS[0]} before the point and {_MAX_DIGITS[1]} after"
        if not term.name or _is_mixture(term.name):
            return f"'{term.name}' as a part of a mixture", "an adapter's name"
        if names.count(term.name) > 1:
            return f"'{term.name}' twice in a mixture", "each part once, with the sum of its weights"
    return None


def _is_mixture(text: str) -> bool:
    """Whether a text, or its path before a revision, has the form of a mixture; takes any text, in linear time."""
    return _terms(text) is not None or _terms(text.partition("@")[0]) is not None


def _terms(text: str) -> list[Term] | None:
    """Return the terms in the order of the text, whatever their faults; None for a text that is no mixture."""
    names_and_weights = _WEIGHT.split(text)
    if names_and_weights.pop() or text.endswith("+"):
        return None
    pairs = zip(names_and_weights[::2], names_and_weights[1::2], strict=True)
    return [Term(name, _shortest(weight)) for name, weight in pairs]


def _shortest(weight: str) -> str:
    whole, _, rest = weight.removeprefix("-").partition(".")
    digits = f"{whole.lstrip('0') or '0'}.{rest}".rstrip("0").rstrip(".") if rest else whole.lstrip("0") or "0"
    return f"-{digits}" if weight.startswith("-") else digits
