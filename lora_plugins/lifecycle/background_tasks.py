"""Work in an API server's event loop that no caller awaits: one task, or many items of which a few run at a time.

`background` runs one coroutine. `FewAtOnce` runs a coroutine for each item, and makes no task for items that wait:
100,000 waiting tasks make every garbage collection visit a million objects, and stop the event loop for half
a second. `Places` of `resolvers/fair_places.py` limits callers that wait; here no caller waits, nothing is refused, and
an item ends by name. `in_steps` walks a long sequence without holding the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.log import logger

_T = TypeVar("_T")
_tasks: set[asyncio.Task[Any]] = set()  # the event loop holds tasks by weak references only
_AT_ONCE = 200  # items between two turns of the event loop


def background(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Run `work` to its end, awaited or not; a failure is logged, and reaches a caller that awaits the task too."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        shown = None if isinstance(error, LoRAPluginsError) else error
        logger.error("Work in the background failed: %r", error, exc_info=shown)


@dataclass(eq=False)
class FewAtOnce(Generic[_T]):
    """Runs `work` for items, at most `limit` of one place at once, first come first served.

    Attributes:
        work: never raises.
        place_of: the place of an item; items of one place share the limit.
        on_idle: called when no item is left.
    """

    work: Callable[[_T], Coroutine[None, None, None]]
    place_of: Callable[[_T], str]
    limit: int
    on_idle: Callable[[], None] = lambda: None
    _waiting: dict[str, _T] = field(default_factory=dict)
    _queues: defaultdict[str, deque[tuple[str, _T]]] = field(default_factory=lambda: defaultdict(deque))
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _running_at: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def begin(self, name: str, item: _T) -> None:
        """Start the work for an item, unless the item waits already, or work runs under its name."""
        # By identity: a new item under a waiting name replaces the old item.
        if name in self._running or self._waiting.get(name) is item:
            return
        self._waiting[name] = item
        self._is_idle.clear()
        place = self.place_of(item)
        self._queues[place].append((name, item))
        self._fill(place)

    def end(self, name: str) -> asyncio.Task[None] | None:
        """Cancel the work under this name, and return its task where the work had begun; the name is free at once."""
        self._waiting.pop(name, None)
        if (task := self._running.pop(name, None)) is not None:
            task.cancel()
        return task

    def end_all(self) -> None:
        for name in [*self._waiting, *self._running]:
            self.end(name)

    async def idle(self) -> None:
        await self._is_idle.wait()

    def _fill(self, place: str) -> None:
        queue = self._queues[place]
        while queue and self._running_at[place] < self.limit:
            name, item = queue.popleft()
            # `end`, or `begin` with another item, has replaced the entry since.
            if self._waiting.get(name) is not item:
                continue
            del self._waiting[name]
            self._running_at[place] += 1
            task = self._running[name] = asyncio.create_task(self.work(item))
            task.add_done_callback(partial(self._ended, place, name))
        # Places without items leave nothing behind.
        if not queue and not self._running_at[place]:
            del self._queues[place], self._running_at[place]
        if not len(self) and not self._is_idle.is_set():
            self._is_idle.set()
            self.on_idle()

    def _ended(self, place: str, name: str, task: asyncio.Task[None]) -> None:
        # After `end` and a new `begin`, the name belongs to a newer task.
        if self._running.get(name) is task:
            del self._running[name]
        self._running_at[place] -= 1
        self._fill(place)


async def in_steps(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Yield the items, with a turn of the event loop after each 200."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
