"""Callers that ask for the same at the same time share one answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class SingleFlight(Generic[_K, _T]):
    """One task for each key; it goes on when a caller is cancelled, for the others and for what it leaves behind."""

    def __init__(self, abandoned: Callable[[_T], None] = lambda _: None) -> None:
        """Make one; `abandoned` gets each result that nobody has waited for until the end."""
        self._tasks: dict[_K, asyncio.Task[_T]] = {}
        self._waiting: Counter[_K] = Counter()
        self._abandoned = abandoned

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, key: _K, start: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of the task of this key, which `start` begins if there is none."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(start())
            task.add_done_callback(lambda task: self._done(key, task))
        self._waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if self._tasks.get(key) is task:  # cancelled; who waits until the end is counted by `_done`
                self._waiting[key] -= 1

    def _done(self, key: _K, task: asyncio.Task[_T]) -> None:
        del self._tasks[key]
        waiting = self._waiting.pop(key)
        if task.cancelled() or task.exception() is not None:  # looked at, also where every caller has been cancelled
            return
        if not waiting:
            self._abandoned(task.result())
