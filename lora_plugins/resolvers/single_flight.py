"""Concurrent callers of one name: `SingleFlight` gives them one answer, `NameLocks` has them go one after the other.

Runs on one event loop, in an API server.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lora_plugins.errors import SourceUnavailable

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Flight(Generic[_T]):
    """A running task: the number of callers that wait for the result, and whether a caller has received the result."""

    task: asyncio.Task[_T]
    waiting: int = 0
    is_taken: bool = False


class SingleFlight(Generic[_K, _T]):
    """One task for each key; the task goes on when a caller is cancelled, for other callers and for lasting effects."""

    def __init__(self, abandoned: Callable[[_T], None] = lambda _: None) -> None:
        """Make an object without tasks; `abandoned` gets each result that no caller has received."""
        self._flights: dict[_K, _Flight[_T]] = {}
        self._abandoned = abandoned

    async def run(self, key: _K, start: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of the key's task, which `start` begins if there is none.

        Raises:
            SourceUnavailable: the task was given up.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(start()))
            flight.task.add_done_callback(lambda _: self._done(key, flight))
        flight.waiting += 1
        try:
            # The shield: a caller's cancellation ends the caller's wait, and not the task of all callers.
            result = await asyncio.shield(flight.task)
            flight.is_taken = True
            return result
        except asyncio.CancelledError:
            # Either the caller was cancelled, or `give_up` has cancelled the task under a caller who still waits.
            caller = asyncio.current_task()
            if not flight.task.cancelled() or caller is None or caller.cancelling():
                raise
            raise SourceUnavailable(
                "an engine that has ended",
                expected="an engine that runs",
                remedy="ask another server, or start this one",
            ) from None
        finally:  # a caller may be cancelled between the end of the task and the caller's next step
            flight.waiting -= 1
            self._check(flight)

    def give_up(self) -> None:
        """Cancel all tasks: their callers get an error."""
        for flight in self._flights.values():
            flight.task.cancel()

    def _done(self, key: _K, flight: _Flight[_T]) -> None:
        del self._flights[key]
        self._check(flight)

    def _check(self, flight: _Flight[_T]) -> None:
        """Hand a result that no caller has received, and none can receive any more, to `abandoned`; once."""
        if flight.waiting or flight.is_taken or not flight.task.done():
            return
        if flight.task.cancelled() or flight.task.exception() is not None:  # read, so that asyncio logs nothing
            return
        flight.is_taken = True
        self._abandoned(flight.task.result())


class NameLocks(weakref.WeakValueDictionary[str, asyncio.Lock]):
    """One lock per name for as long as a task holds or awaits the lock.

    Replaces vLLM's `defaultdict(Lock)`, which keeps a lock for every name that any request has asked for.
    """

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self.setdefault(name, asyncio.Lock())
