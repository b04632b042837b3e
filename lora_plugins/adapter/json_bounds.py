"""How much JSON is parsed: its values are counted and its depth is measured before a parser builds any of them.

`json.loads` takes a hundred times a text's size in memory where that is full of small values, and the interpreter's
lock until it has ended. Both bounds are far above what any real file has: a list of every expert of Kimi K2, with a
rank and an alpha for each, has 210,000 values at a depth of 2.
"""

from __future__ import annotations

import re

MAX_VALUES = 1_000_000
MAX_DEPTH = 100

_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


def check_json(data: bytes) -> None:
    """Refuse a text with more values, or nested deeper, than is parsed; what is no JSON may pass.

    Raises:
        ValueError: it is; says what was found.
    """
    # Each value but the first stands behind one of these; in texts they count as well, which spares reading them.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES} values")
    depth = 0
    for bracket in _BRACKETS.finditer(_TEXTS.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON that nests too deep, by more than {MAX_DEPTH}")
