"""Callers that ask for the same at the same time share one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class SingleFlight(Generic[_K, _T]):
    """One task for each key; it goes on when a caller is cancelled, for the others and for what it leaves behind."""

    def __init__(self) -> None:
        self._tasks: dict[_K, asyncio.Task[_T]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, key: _K, start: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of the task of this key, which `start` begins if there is none."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(start())
            task.add_done_callback(lambda task: self._done(key, task))
        return await asyncio.shield(task)

    def _done(self, key: _K, task: asyncio.Task[_T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # looked at, also where every caller has been cancelled
