"""Ask a remote source again while that may help, and only until a deadline."""

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
    """The deadline for finding an adapter: that of a fetch, but half a minute or a tenth of it where it is longer."""
    return min(fetch_timeout_s, max(_LOOK_UP_S, fetch_timeout_s / 10))


@dataclass(frozen=True, slots=True)
class Retries:
    """When to ask again.

    Attributes:
        timeout_s: for everything, retries included; a fetch has more, see `fetch_timeout_s`.
        attempts: tries that bring nothing, before it is given up.
        wait_s: before the second try; doubled each time up to `max_wait_s`, with as much jitter again.
    """

    timeout_s: float = 300.0
    attempts: int = 5
    wait_s: float = 0.1
    max_wait_s: float = 5.0

    def fetch_timeout_s(self, files: Iterable[SourceFile]) -> float:
        """The deadline of a fetch of these files: `timeout_s`, and what their bytes take."""
        return fetch_timeout_s(sum(file.size_bytes for file in files), self.timeout_s)

    async def run(self, ask: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """The answer to `ask`, which is called again where it raises `Transient`."""
        async for attempt in stamina.retry_context(
            on=backoff,
            attempts=self.attempts,
            timeout=None,  # the deadline's business
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
    """What to say when the time is over: the last failure before, if there was any."""

    last_failure: Transient | None = None


@asynccontextmanager
async def deadline(timeout_s: float, expected: str = "the adapter's files") -> AsyncIterator[Deadline]:
    """End what is inside after `timeout_s` seconds.

    Raises:
        SourceUnavailable: the time is over; it names the last failure, if any.
    """
    state = Deadline()
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            yield state
    except TimeoutError:
        if not timeout.expired():
            raise
        last = state.last_failure
        then = f"; the last failure: {last.found}" if last else ""
        raise SourceUnavailable(
            f"no complete answer within {round(timeout_s, 1):g} s{then}",
            expected=expected,
            remedy="check the network and the source, or raise LORA_PLUGINS_FETCH_TIMEOUT_S",
            file=last.file if last else "",
        ) from None


def backoff(error: Exception) -> bool | float:
    """For `stamina`: whether to try again, or after how many seconds where the source says so."""
    if not isinstance(error, Transient):
        return False
    return True if error.wait_s is None else error.wait_s
