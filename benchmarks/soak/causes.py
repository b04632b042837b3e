"""Why a request may be refused: each fault with whom it may reach, what it may cause, and since when and until when.

A fault counts where it has hit: the proxy of a source says which requests it broke, and those say for which name. A
fault that hit nobody explains nothing. What no cause explains is a violation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Refusal = tuple[int, str]
"""Status and code."""
SOURCE_FAILS: frozenset[Refusal] = frozenset({(503, "L006")})
DISK_IS_FULL: frozenset[Refusal] = frozenset({(507, "L004")})

# How long after its last hit a fault may still refuse: two seconds for which an outage is remembered, and what a loaded
# machine needs to say so.
AFTER_S = 15.0
# What the server says where it has not asked the source: the breaker is open, or all places are taken.
UNASKED = ("asked only now and then", "too many names that this server", "slow to answer", "that have not ended")
# What it says where the time was over, which began with a hit and did not end with one.
OVERDUE, LONGEST_FLIGHT_S = "no complete answer within", 45.0


@dataclass(eq=False)
class Cause:
    """One fault.

    Attributes:
        whom: a name, `of_source` of one, or `DISK`.
        ended: when it can refuse nobody any more; infinite while it is on.
        texts: only what says one of these; all where empty.
    """

    what: str
    whom: str
    began: float
    ended: float = math.inf
    refusals: frozenset[Refusal] = SOURCE_FAILS
    texts: tuple[str, ...] = ()

    def explains(self, refusal: Refusal, text: str, began: float, ended: float) -> bool:
        after_s = LONGEST_FLIGHT_S - AFTER_S if OVERDUE in text and not self.texts else 0.0
        if refusal not in self.refusals or self.began > ended or self.ended + after_s < began:
            return False
        return not self.texts or any(said in text for said in self.texts)


DISK = "@disk"


def of_source(source: str) -> str:
    """Everybody whose adapter is looked for there."""
    return f"@{source}"


class Causes:
    """All causes of a soak; `look` is called before they are asked: a hit may be a moment old."""

    def __init__(self) -> None:
        self._causes: dict[str, list[Cause]] = defaultdict(list)
        self.look: list[Callable[[], None]] = []

    def add(self, cause: Cause) -> Cause:
        self._causes[cause.whom].append(cause)
        return cause

    def explaining(self, whom: Iterable[str], refusal: Refusal, text: str, began: float, ended: float) -> Cause | None:
        """The cause of a refusal of a request that ran between these; None where there was none."""
        self.refresh()
        causes = (cause for one in whom for cause in reversed(self._causes.get(one, ())))
        return next((cause for cause in causes if cause.explains(refusal, text, began, ended)), None)

    def held_up(self, whom: Iterable[str], began: float, ended: float) -> bool:
        """Whether any fault was on while a request ran."""
        self.refresh()
        return any(c.began <= ended and c.ended >= began for one in whom for c in self._causes.get(one, ()))

    def may_refuse(self, whom: Iterable[str], at: float, status: int | None = None) -> bool:
        """Whether any refusal, or one of this status, could be explained at this moment."""
        return any(
            cause.began <= at <= cause.ended
            for one in whom
            for cause in self._causes.get(one, ())
            if status is None or any(allowed == status for allowed, _ in cause.refusals)
        )

    def forget(self, before: float) -> None:
        """Drop what ended before this time."""
        for whom, causes in list(self._causes.items()):
            causes[:] = [cause for cause in causes if cause.ended >= before]
            if not causes:
                del self._causes[whom]

    def end_all(self, at: float) -> None:
        """No fault explains anything after this time."""
        self.refresh()
        for causes in self._causes.values():
            for cause in causes:
                cause.ended = min(cause.ended, at)

    def refresh(self) -> None:
        """Hear of what has been hit until now."""
        for look in self.look:
            look()
