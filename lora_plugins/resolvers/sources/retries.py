"""Repeat a question to a remote source while a retry may help, and only until a deadline, which progress moves.

Runs on the event loop of the source that asks: a source runs its question by `Retries.run` in a block of `deadline`,
and gets the answer, or an error of this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import stamina

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.remote_failures import Transient

_T = TypeVar("_T")
_LOOK_UP_S = 30.0


def look_up_timeout_s(fetch_timeout_s: float) -> float:
    """Seconds for finding an adapter: a fetch's deadline, or less: the larger of 30 s and a tenth of the deadline."""
    return min(fetch_timeout_s, max(_LOOK_UP_S, fetch_timeout_s / 10))


@dataclass(frozen=True, slots=True)
class Retries:
    """When to ask again.

    Attributes:
        timeout_s: for the whole question, retries included; of a fetch, for each silence.
        attempts: tries without progress before giving up.
        wait_s: before the second try; doubled each time up to `max_wait_s`, with as much jitter again.
    """

    timeout_s: float = 300.0
    attempts: int = 5
    wait_s: float = 0.1
    max_wait_s: float = 5.0

    async def run(self, ask: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """The answer to `ask`, which is called again after `Transient`."""

        def again(error: Exception) -> bool | float:
            if isinstance(error, Transient):
                deadline.last_failure = error
            return backoff(error)

        # No time-out here: `deadline` bounds the time.
        caller = stamina.AsyncRetryingCaller(self.attempts, None, self.wait_s, self.max_wait_s, self.wait_s)
        return await caller(again, ask)


@dataclass(slots=True)
class Deadline:
    """A deadline of `timeout_s` seconds, and the last failure before the deadline, for its error."""

    timeout: asyncio.Timeout
    timeout_s: float | None
    last_failure: Transient | None = None
    has_progress: bool = False

    def progressed(self) -> None:
        """Note that bytes have come: the time begins again. To be called on the loop of the block."""
        self.has_progress = True
        if self.timeout_s is not None:
            with suppress(RuntimeError):  # a thread reports after the end of the block
                self.timeout.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    def progressed_in_thread(self) -> Callable[[], object]:
        """Return `progressed` for another thread to call. To be called on the loop of the block."""
        return partial(asyncio.get_running_loop().call_soon_threadsafe, self.progressed)


class NoAnswer(SourceUnavailable):
    """L006: a source gave no complete answer within a deadline, in as many tries as the time allowed."""


@asynccontextmanager
async def deadline(
    timeout_s: float | None, expected: str = "the adapter's files", *, variable: str = "LORA_PLUGINS_FETCH_TIMEOUT_S"
) -> AsyncIterator[Deadline]:
    """End the block after `timeout_s` seconds, or so long after the last progress; with None, never.

    Raises:
        NoAnswer: the time is over; the error names the last failure, if any.
    """
    state = Deadline(asyncio.timeout(timeout_s), timeout_s)
    try:
        async with state.timeout:
            yield state
    except TimeoutError:
        # A TimeoutError of the block itself is no end of the deadline.
        if timeout_s is None or not state.timeout.expired():
            raise
        last = state.last_failure
        then = f"; the last failure: {last.found}" if last else ""
        raise NoAnswer(
            f"no {'further byte' if state.has_progress else 'complete answer'} within {round(timeout_s, 1):g} s{then}",
            expected=expected,
            remedy=f"check the network and the source, or raise {variable}",
            file=last.file if last else "",
        ) from None


def backoff(error: Exception) -> bool | float:
    """For `stamina`: whether to try again, or after how many seconds if the source asks for a wait."""
    return isinstance(error, Transient) and (error.wait_s or True)
