"""Chooses the requests for unknown names that are logged: clients choose names, and the number of requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools import TTLCache

from lora_plugins.events import AdapterUnknown

_SAME_NAME_EVERY_S = 60.0
_LINES_PER_MINUTE = 20
_REMEMBERED = 1024
_SHOWN_CHARACTERS = 120
_SHOWN_PLACE_CHARACTERS = 500


class UnknownNames:
    """A line for each name once a minute, and at most 20 lines a minute for all names together.

    Requests without a line are counted, and the next line has the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: TTLCache[str, bool] = TTLCache(_REMEMBERED, _SAME_NAME_EVERY_S, timer=clock)
        self._minute_began = float("-inf")
        self._lines = 0
        self._left_out = 0

    def line(self, event: AdapterUnknown) -> str | None:
        """Return the line to log, or None."""
        now = self._clock()
        if now - self._minute_began >= 60:
            self._minute_began, self._lines = now, 0
        name = _shortened(event.name, _SHOWN_CHARACTERS)
        if name in self._said or self._lines >= _LINES_PER_MINUTE:
            self._left_out += 1
            return None
        self._said[name] = True
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more requests for unknown names since the last such line)" if left_out else ""
        return f"No adapter '{name}': {_reasons(event)}{more}"


def _reasons(event: AdapterUnknown) -> str:
    if event.reason:
        return f"{_shortened(event.reason, _SHOWN_PLACE_CHARACTERS)}; no source was asked"
    if not event.absences:
        return "there is no source to ask"
    asked = (f"{absence.source}: {_shortened(str(absence), _SHOWN_PLACE_CHARACTERS)}" for absence in event.absences)
    return "; ".join(asked)


def _shortened(text: str, characters: int) -> str:
    """Return the text with a limited length, and with every character escaped that could forge a line."""
    cut = text[:characters]
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
    return shown if len(text) <= characters else f"{shown}… ({len(text)} characters)"
