"""Repeat a question to a remote source while a retry may help, and only until a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import stamina

from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.errors import Transient
from lora_plugins.resolvers.sources.source import SourceFile
from lora_plugins.store.store import fetch_timeout_s

_T = TypeVar("_T")
_LOOK_UP_S = 30.0


def look_up_timeout_s(fetch_timeout_s: float) -> float:
    """Seconds for finding an adapter: a fetch's deadline, or less: the larger of 30 s and a tenth of the deadline."""
    return min(fetch_timeout_s, max(_LOOK_UP_S, fetch_timeout_s / 10))


@dataclass(frozen=True, slots=True)
class Retries:
    """When to ask again.

    Attributes:
        timeout_s: for the whole question, retries included; a fetch has more, see `fetch_timeout_s`.
        attempts: tries without progress before giving up.
        wait_s: before the second try; doubled each time up to `max_wait_s`, with as much jitter again.
    """

    timeout_s: float = 300.0
    attempts: int = 5
    wait_s: float = 0.1
    max_wait_s: float = 5.0

    def fetch_timeout_s(self, files: Iterable[SourceFile]) -> float:
        """The deadline of a fetch of these files: `timeout_s`, and time for the bytes."""
        return fetch_timeout_s(sum(file.size_bytes for file in files), self.timeout_s)

    async def run(self, ask: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """The answer to `ask`, which is called again after `Transient`."""
        async for attempt in stamina.retry_context(
            on=backoff,
            attempts=self.attempts,
            timeout=None,  # `deadline` bounds the time
            wait_initial=self.wait_s,
            wait_max=self.max_wait_s,
            wait_jitter=self.wait_s,
        ):
            with attempt:
                try:
                    return await ask()
                except Transient as error:
                    deadline.last_failure = error
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")


@dataclass(slots=True)
class Deadline:
    """The last failure before a deadline, for the deadline's error."""

    last_failure: Transient | None = None


class NoAnswer(SourceUnavailable):
    """L006: a source gave no complete answer within a deadline, in as many tries as the time allowed."""


@asynccontextmanager
async def deadline(timeout_s: float, expected: str = "the adapter's files") -> AsyncIterator[Deadline]:
    """End the block after `timeout_s` seconds.

    Raises:
        NoAnswer: the time is over; the error names the last failure, if any.
    """
    state = Deadline()
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            yield state
    except TimeoutError:
        # A TimeoutError of the block itself is no end of the deadline.
        if not timeout.expired():
            raise
        last = state.last_failure
        then = f"; the last failure: {last.found}" if last else ""
        raise NoAnswer(
            f"no complete answer within {round(timeout_s, 1):g} s{then}",
            expected=expected,
            remedy="check the network and the source, or raise LORA_PLUGINS_FETCH_TIMEOUT_S",
            file=last.file if last else "",
        ) from None


def backoff(error: Exception) -> bool | float:
    """For `stamina`: whether to try again, or after how many seconds if the source asks for a wait."""
    if not isinstance(error, Transient):
        return False
    return True if error.wait_s is None else error.wait_s
