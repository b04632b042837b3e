"""A circuit breaker for one source: while the source does not answer, its names are refused at once.

Failures in a row open the breaker, and so does one look-up that nobody answered within its whole deadline, unless the
source has answered another look-up since. An open breaker admits one look-up every `retry_s`, whether the look-up
before has ended or not: a connection that hangs after the end of an outage delays nobody. The first answer, also a late
answer, closes the breaker. Fetches have a breaker of their own, see `fetch_places.py`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Self, TypeVar

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.events import BreakerClosed, BreakerOpened, Events
from lora_plugins.resolvers.sources.errors import FailureKind, RemoteFailure, Transient
from lora_plugins.resolvers.sources.retries import NoAnswer

_T = TypeVar("_T")


class BreakerOpen(SourceUnavailable):
    """L006: the source has not answered the look-ups before this one, and was not asked."""

    is_of_one_request = True  # nothing to remember: the breaker refuses as fast, and closes at the first answer

    @classmethod
    def of_source(cls) -> Self:
        """The refusal, without the last failure's text, which may name an adapter of another caller."""
        return cls(
            "a source that does not answer, and is asked only now and then until it does",
            expected="an answer of the source",
            remedy="ask again; see the server's log for the failure",
        )


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and how often an open breaker admits a look-up.

    Attributes:
        failures: failed look-ups in a row; each look-up has tried several times. Where failures say of which adapter
            they are, those of one adapter count once.
        retry_s: seconds between look-ups that an open breaker admits, and for which such a look-up's caller waits.
        by_silence: whether one look-up without any answer is enough.
    """

    failures: int = 5
    retry_s: float = 1.0
    by_silence: bool = True


class Breaker:
    """The state of one source; `clock` is in seconds."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._failed: set[Hashable] = set()
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

    def failed(self, began_at: float, error: SourceUnavailable, of: Hashable = None) -> bool:
        """Note the failure of a look-up, or of the adapter `of`; returns whether the failure opens the breaker.

        Only failures that several tries have met count: another kind of failure is an answer.
        """
        if began_at < self._answered_at:
            return False  # the source has answered since
        if self.is_open:
            return False
        self._failed.add(object() if of is None else of)
        if len(self._failed) < self.limits.failures and not (self.limits.by_silence and is_silence(error)):
            return False
        self._opened_at = self.clock()
        self._retry_at = self._opened_at + self.limits.retry_s
        return True

    def answered(self) -> float | None:
        """Note an answer; returns the seconds for which the breaker was open, None where the breaker was closed."""
        self._answered_at = self.clock()
        self._failed.clear()
        opened_at, self._opened_at = self._opened_at, None
        return None if opened_at is None else self._answered_at - opened_at


class SourceBreaker(Breaker):
    """A breaker that learns from what it awaits, and emits events of its opening and closing, under a label."""

    def __init__(
        self, limits: BreakerLimits, label: str, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(limits, clock)
        self._label, self._events = label, events

    async def judged(self, answer: Awaitable[_T], of: Hashable = None) -> _T:
        """An answer of the source, about the adapter `of`; an error that is no outage is an answer too."""
        began_at = self.clock()
        try:
            found = await answer
        except LoRAPluginsError as error:
            if not isinstance(error, SourceUnavailable) or not is_outage(error):
                self._note_answer()
            elif self.failed(began_at, error, of):
                self._events.emit(BreakerOpened(self._label, error))
            raise
        self._note_answer()
        return found

    def _note_answer(self) -> None:
        if (open_s := self.answered()) is not None:
            self._events.emit(BreakerClosed(self._label, open_s))


def is_outage(error: BaseException) -> bool:
    """Whether an error is about the source, and no answer about one adapter, such as a denial."""
    return isinstance(error, (Transient, NoAnswer))


def is_silence(error: SourceUnavailable) -> bool:
    """Whether a look-up had no answer in all of its time."""
    return isinstance(error, NoAnswer) or (isinstance(error, RemoteFailure) and error.kind is FailureKind.TIMEOUT)
