"""A circuit breaker for one source: while the source does not answer, its names are refused at once.

Failures in a row open the breaker, and so does one look-up that nobody answered within its whole deadline, unless the
source has answered another look-up since. An open breaker admits one look-up every `retry_s`, whether the look-up
before has ended or not: a connection that hangs after the end of an outage delays nobody. The first answer, also a late
answer, closes the breaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.errors import FailureKind, RemoteFailure, Transient
from lora_plugins.resolvers.sources.retries import NoAnswer


class BreakerOpen(SourceUnavailable):
    """L006: the source has not answered the look-ups before this one, and was not asked."""

    is_of_one_request = True  # nothing to remember: the breaker refuses as fast, and closes at the first answer


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and how often an open breaker admits a look-up.

    Attributes:
        failures: failed look-ups in a row; each look-up has tried several times.
        retry_s: seconds between look-ups that an open breaker admits, and for which such a look-up's caller waits.
    """

    failures: int = 5
    retry_s: float = 1.0


class Breaker:
    """The state of one source; `clock` is in seconds."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._failures = 0
        self._answered_at = float("-inf")
        self._opened_at: float | None = None
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether look-ups are refused, all but one every `retry_s`."""
        return self._opened_at is not None

    def admits(self) -> bool:
        """Whether an open breaker lets a look-up begin now; then no other look-up for `retry_s`."""
        now = self.clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self.limits.retry_s
        return True

    def failed(self, began_at: float, error: SourceUnavailable) -> bool:
        """Note the failure of a look-up; returns whether the failure opens the breaker.

        Only failures that several tries have met count: another kind of failure is an answer.
        """
        if began_at < self._answered_at:
            return False  # the source has answered since
        self._failures += 1
        if self.is_open or not (is_silence(error) or self._failures >= self.limits.failures):
            return False
        self._opened_at = self.clock()
        self._retry_at = self._opened_at + self.limits.retry_s
        return True

    def answered(self) -> float | None:
        """Note an answer; returns the seconds for which the breaker was open, None where the breaker was closed."""
        self._answered_at = self.clock()
        self._failures = 0
        opened_at, self._opened_at = self._opened_at, None
        return None if opened_at is None else self._answered_at - opened_at


def is_outage(error: BaseException) -> bool:
    """Whether an error is about the source, and no answer about one adapter, such as a denial."""
    return isinstance(error, (Transient, NoAnswer))


def is_silence(error: SourceUnavailable) -> bool:
    """Whether a look-up had no answer in all of its time."""
    return isinstance(error, NoAnswer) or (isinstance(error, RemoteFailure) and error.kind is FailureKind.TIMEOUT)
