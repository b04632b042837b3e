"""Names that somebody may have misspelt."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` closest to `name`, letter case aside; None without a close name."""
    by_folded = {one.casefold(): one for one in sorted(known, reverse=True)}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.75)
    return by_folded[found[0]] if found else None
