"""vLLM's queue of waiting requests, of which only requests whose adapter is ready are handed out.

Runs in the engine core process, in the place of vLLM's `RequestQueue` (vllm/v1/core/sched/request_queue.py, 0.30 to
0.33), and has its interface. Every request enters the queue when it comes, and keeps its place until it runs. A request
belongs to a group: the base model's requests, or the requests of an adapter. vLLM sees the first request of all groups
that are open; requests of closed groups stay where they are, and cost a step nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lora_plugins.scheduler.ranking import Ranking

Order = tuple[int, int, float, str]
"""A place in the queue: rank of the queue, priority, number or time of arrival, and the id of the request."""
LAST: Order = (1 << 30, 0, 0.0, "")
"""A place behind every request."""
CLOSED = object()
"""A group that never opens: requests that were refused, or wait for a resume."""


def priority_of(order: Order) -> int:
    """Return the vLLM priority in a place; smaller is better."""
    return order[1]


@dataclass(frozen=True, slots=True)
class _Waiting:
    order: Order
    request: Any
    group: Hashable


class QueueOrder:
    """Gives places in vLLM's order: first come, first served, or `is_by_priority`: by priority, then by arrival."""

    def __init__(self, *, is_by_priority: bool = False) -> None:
        self._is_by_priority = is_by_priority
        self._last, self._first = count(1), count(-1, -1)

    def of_request(self, request: Any, rank: int = 1, *, is_front: bool = False) -> Order:
        """Return the place of a request that comes, or `is_front`: of a request that vLLM has preempted."""
        if self._is_by_priority:  # as `Request.__lt__` in vllm/v1/request.py, 0.30 to 0.33
            return rank, request.priority, request.arrival_time, request.request_id
        return rank, 0, next(self._first if is_front else self._last), ""

    def of_call(self, now: float) -> Order:
        """Return the place of a call without a request."""
        return 1, 0, now if self._is_by_priority else next(self._last), ""


@dataclass(eq=False)
class QueuePlaces:
    """What the queues of one scheduler share.

    Args:
        enter: called with a request that enters a queue, the queue's rank, and whether the request comes to the front;
            returns the request's group and place.
        group_of: the group of a waiting request. The group None is always open.
        open_groups: the other groups that are open now, as the planner keeps them.

    Attributes:
        popped: the places of requests that vLLM has taken out in this step, by id.
        removed: requests that vLLM has removed since the scheduler looked last.
        reached: the last place to which vLLM has come in this step, with a row to give.
        is_exhausted: whether vLLM has found no further request that may run in this step.
    """

    enter: Callable[[Any, int, bool], tuple[Hashable, Order]]
    group_of: Callable[[Any], Hashable]
    open_groups: Collection[Hashable]
    popped: dict[str, Order] = field(default_factory=dict)
    removed: list[Any] = field(default_factory=list)
    reached: Order | None = None
    is_exhausted: bool = False

    def begin_step(self) -> None:
        """Forget the step before: vLLM schedules from here on."""
        self.popped, self.reached, self.is_exhausted = {}, None, False

    def take_popped(self) -> list[str]:
        """Return the requests that vLLM took out and did not put back, by id: they run from now on."""
        popped, self.popped = list(self.popped), {}
        return popped


class AdapterQueue:
    """One of vLLM's queues of waiting requests; a smaller rank comes first.

    Number and iteration are of all requests, truth and head of requests that may run.
    """

    def __init__(self, places: QueuePlaces, rank: int) -> None:
        self._places, self._rank = places, rank
        self._entries: dict[str, _Waiting] = {}
        self._groups: dict[Hashable, Ranking[str]] = {}  # the waiting requests of each group, by id

    def add_request(self, request: Any) -> None:
        self._enter(request, is_front=False)

    def prepend_request(self, request: Any) -> None:
        """Add a request at the front; a request that was taken out in this step comes back to its place."""
        self._enter(request, is_front=True)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests at the front, the last of them first, as vLLM does."""
        for request in requests:
            self._enter(request, is_front=True)

    def _enter(self, request: Any, *, is_front: bool) -> None:
        popped = self._places.popped.pop(request.request_id, None)
        if popped is not None:
            self._put(request, self._places.group_of(request), (self._rank, *popped[1:]))
        else:
            self._put(request, *self._places.enter(request, self._rank, is_front))

    def _put(self, request: Any, group: Hashable, order: Order) -> None:
        self._discard(request.request_id)
        self._entries[request.request_id] = _Waiting(order, request, group)
        self._groups.setdefault(group, Ranking()).put(request.request_id, order)

    def _discard(self, request_id: str) -> bool:
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        group = self._groups[entry.group]
        group.remove(request_id)
        if not group.ranks:
            del self._groups[entry.group]
        return True

    def regroup(self, request: Any) -> None:
        """Put a waiting request into its present group, at the place that it has."""
        if (entry := self._entries.get(request.request_id)) is not None:
            self._put(request, self._places.group_of(request), entry.order)

    def place_of(self, request: Any) -> Order | None:
        """Return the place of a waiting request; None where the request is in another queue, or in none."""
        entry = self._entries.get(request.request_id)
        return None if entry is None else entry.order

    def peek_request(self) -> Any:
        """Return the first request that may run.

        Raises:
            IndexError: no request may run.
        """
        if (first := self._first()) is None:
            raise IndexError("peek from a queue without a request that may run")
        reached = self._places.reached
        self._places.reached = first.order if reached is None else max(reached, first.order)
        return first.request

    def pop_request(self) -> Any:
        """Take out the first request that may run.

        Raises:
            IndexError: no request may run.
        """
        if (first := self._first()) is None:
            raise IndexError("pop from a queue without a request that may run")
        self._discard(first.request.request_id)
        self._places.popped[first.request.request_id] = first.order
        return first.request

    def remove_request(self, request: Any) -> None:
        """Take out a request.

        Raises:
            ValueError: the queue has no such request.
        """
        if not self._discard(request.request_id):
            raise ValueError(f"{request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out requests; others are left alone."""
        self._places.removed += [request for request in requests if self._discard(request.request_id)]

    def __bool__(self) -> bool:
        """Whether a request may run."""
        if self._first() is not None:
            return True
        self._places.is_exhausted = self._places.is_exhausted or self._rank > 0
        return False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return (entry.request for entry in sorted(self._entries.values(), key=lambda it: it.order))

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self._entries

    def _first(self) -> _Waiting | None:
        waiting, are_open = self._groups, self._places.open_groups
        # By the shorter of the two loops: every adapter may wait, and every adapter may be open.
        if len(waiting) <= len(are_open):
            groups = [group for group in waiting if group is None or group in are_open]
        else:
            groups = [group for group in (None, *are_open) if group in waiting]
        firsts = [first for group in groups if (first := waiting[group].first()) is not None]
        return self._entries[min(firsts)[1]] if firsts else None
