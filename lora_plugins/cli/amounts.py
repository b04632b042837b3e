"""Bytes and times as people read them."""

from __future__ import annotations

import time

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(size_bytes: float) -> str:
    """Bytes, in powers of 1000 and three digits."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.3g} {unit}"


def ago(at: float | None) -> str:
    """How long ago a time in seconds since 1970 was; `never` for none."""
    if not at:
        return "never"
    seconds = max(0.0, time.time() - at)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def number(count: int, what: str) -> str:
    """A count with its noun."""
    return f"{count} {what}{'' if count == 1 else 's'}"
