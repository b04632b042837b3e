"""Whether a source answers: a circuit breaker, so that requests do not wait for a source that is down.

Runs on the event loop of an API server, around each look-up and each fetch (`admission.py`). In go the source's answers
and errors; out comes whether the source may be asked now.

Failures in a row open the breaker, and so does one look-up that nobody answered within its whole deadline, unless the
source has answered another look-up since. An open breaker admits one look-up every `retry_s`, whether the look-up
before has ended or not: a connection that hangs after the end of an outage delays nobody. The first answer, also a late
answer, closes the breaker.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Self, TypeVar

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.events import BreakerClosed, BreakerOpened, Events
from lora_plugins.resolvers.sources.remote_failures import FailureKind, Transient
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
    """When a breaker opens, and how often an open breaker admits a question: a look-up or a fetch.

    Attributes:
        failures: failed questions in a row that open the breaker; each question has tried several times. Where failures
            say of which adapter they are, those of one adapter count once.
        retry_s: seconds between questions that an open breaker admits, and for which such a question's caller waits.
        by_silence: whether one question without any answer is enough.
    """

    failures: int = 5
    retry_s: float = 1.0
    by_silence: bool = True


class Breaker:
    """Whether one source answers, as the answers that `judged` awaits show. For one event loop.

    Opening and closing are events under `label`. `clock` is in seconds.
    """

    def __init__(
        self,
        limits: BreakerLimits,
        label: str = "",
        events: Events | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.clock = limits, clock
        self._label, self._events = label, events or Events()
        self._failed: set[Hashable] = set()  # adapters or look-ups, since the last answer
        self._answered_at = float("-inf")
        self._opened_at: float | None = None  # None while closed
        self._retry_at = 0.0  # when the open breaker admits the next question

    @property
    def is_open(self) -> bool:
        """Whether look-ups are refused, all but one every `retry_s`."""
        return self._opened_at is not None

    def check(self) -> None:
        """Raise BreakerOpen while open; to be called after a wait for a place, in which the breaker may have opened."""
        if self.is_open:
            raise BreakerOpen.of_source()

    def admits(self) -> bool:
        """Whether an open breaker lets a question begin now; then no other question for `retry_s`."""
        now = self.clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self.limits.retry_s
        return True

    async def judged(self, answer: Awaitable[_T], of: Hashable = None) -> _T:
        """Await and return the source's answer about the adapter `of`; an error that is no outage is an answer too.

        Raises:
            LoRAPluginsError: any error of `answer`.
        """
        began_at = self.clock()
        try:
            found = await answer
        except (Transient, NoAnswer) as error:  # of the source, after several tries, and not of one adapter
            self.failed(began_at, error, of)
            raise
        except LoRAPluginsError:
            self.answered()
            raise
        self.answered()
        return found

    def failed(self, began_at: float, error: Transient | NoAnswer, of: Hashable = None) -> None:
        """Note the failure of a question that began at `began_at`, about the adapter `of` if known."""
        if began_at < self._answered_at or self.is_open:  # the source has answered since, or has failed before
            return
        self._failed.add(object() if of is None else of)
        is_silence = isinstance(error, NoAnswer) or error.kind is FailureKind.TIMEOUT
        if len(self._failed) >= self.limits.failures or (self.limits.by_silence and is_silence):
            self._opened_at = self.clock()
            self._retry_at = self._opened_at + self.limits.retry_s
            self._events.emit(BreakerOpened(self._label, error))

    def answered(self) -> None:
        """Note an answer."""
        self._answered_at = self.clock()
        self._failed.clear()
        opened_at, self._opened_at = self._opened_at, None
        if opened_at is not None:
            self._events.emit(BreakerClosed(self._label, self._answered_at - opened_at))
