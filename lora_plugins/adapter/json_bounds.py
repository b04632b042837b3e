"""Bounds JSON before parsing: values are counted and depth is measured before a parser builds any value.

`json.loads` takes a hundred times a text's size in memory for a text full of small values, and holds the interpreter's
lock until the end. Both bounds are far above any real file: a list of every expert of Kimi K2, with a rank and an alpha
for each, has 210,000 values at a depth of 2.
"""

from __future__ import annotations

import re

MAX_VALUES = 1_000_000
MAX_DEPTH = 100

_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


def check_json(data: bytes) -> None:
    """Refuse a text with too many values, or nested too deep; a text that is no JSON may pass.

    Raises:
        ValueError: the text is over a bound; names the bound.
    """
    # Each value but the first stands behind one of these marks. Marks in texts count as well, which saves reading
    # texts.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES} values")
    # Texts are cut out first: a bracket in a text opens nothing.
    depth = 0
    for bracket in _BRACKETS.finditer(_TEXTS.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON that nests too deep, by more than {MAX_DEPTH}")
