"""What vLLM sees of our queue is what vLLM's own queue would show, less the requests of closed groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from lora_plugins.scheduler.request_queue import CLOSED, AdapterQueue, Order, QueueOrder, QueuePlaces


@dataclass(eq=False)
class Waiting:
    """As much of vLLM's `Request` as its queues look at."""

    request_id: str
    group: str | None
    priority: int
    arrival_time: float

    def __lt__(self, other: Waiting) -> bool:
        return (self.priority, self.arrival_time, self.request_id) < (
            other.priority,
            other.arrival_time,
            other.request_id,
        )


@dataclass
class Bed:
    """One queue of ours, and one of vLLM's that has the same calls."""

    policy: SchedulingPolicy
    open_groups: dict[Any, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = QueueOrder(is_by_priority=self.policy is SchedulingPolicy.PRIORITY)

        def enter(request: Waiting, rank: int, is_front: bool) -> tuple[Any, Order]:
            return request.group, order.of_request(request, rank, is_front=is_front)

        self.places = QueuePlaces(enter, lambda request: request.group, self.open_groups)
        self.ours, self.vllms = AdapterQueue(self.places, 1), create_request_queue(self.policy)

    def may_run(self) -> list[Waiting]:
        return [it for it in self.vllms if it.group is None or it.group in self.open_groups]

    def check(self) -> None:
        assert len(self.ours) == len(self.vllms)
        assert [it.request_id for it in self.ours] == [it.request_id for it in self.vllms]
        assert bool(self.ours) == bool(self.may_run())
        if self.ours:
            assert self.ours.peek_request() is self.may_run()[0]


GROUPS = st.sampled_from([None, "a", "b", "c"])
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), GROUPS, st.integers(0, 2)),
        st.tuples(st.just("schedule"), st.integers(1, 4), st.sets(st.integers(0, 3))),
        st.tuples(st.just("preempt"), st.integers(0, 5), st.none()),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 9)), st.none()),
        st.tuples(st.just("toggle"), GROUPS, st.none()),
        st.tuples(st.just("regroup"), st.integers(0, 9), GROUPS),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", SchedulingPolicy)
@given(calls=CALLS)
def test_the_queue_shows_what_vllms_shows_of_open_groups(policy: SchedulingPolicy, calls: list[Any]) -> None:
    bed, running, number = Bed(policy), list[Waiting](), 0
    for name, one, two in calls:
        match name:
            case "add":
                number += 1
                request = Waiting(f"r{number}", one, two, float(number // 2))
                bed.ours.add_request(request)
                bed.vllms.add_request(request)
            case "schedule":  # some are popped to run, and some to be skipped, which come back together
                bed.places.begin_step()
                skipped, waiting = list[Waiting](), list(bed.vllms)
                for at in range(one):
                    if not bed.ours:
                        break
                    request = bed.ours.pop_request()
                    (skipped if at in two else running).append(request)
                # vLLM passes over requests of closed groups too, and puts all that it skipped back in their order.
                bed.ours.prepend_requests(reversed(skipped))
                bed.vllms.remove_requests(waiting)
                bed.vllms.prepend_requests(reversed([it for it in waiting if it not in running]))
                popped = bed.places.take_popped()
                assert popped == [it.request_id for it in running[len(running) - len(popped) :]]
            case "preempt":
                if running:
                    request = running.pop(one % len(running))
                    bed.ours.prepend_request(request)
                    bed.vllms.prepend_request(request)
            case "remove":
                gone = [it for at, it in enumerate(bed.vllms) if at in one]
                bed.ours.remove_requests(gone)
                bed.vllms.remove_requests(gone)
            case "toggle":
                if one is not None and bed.open_groups.pop(one, 0) == 0:
                    bed.open_groups[one] = None
            case "regroup":
                waiting = list(bed.vllms)
                if waiting:
                    waiting[one % len(waiting)].group = two
                    bed.ours.regroup(waiting[one % len(waiting)])
        bed.check()


def test_a_skipped_request_keeps_its_place_among_closed_ones() -> None:
    bed = Bed(SchedulingPolicy.FCFS)
    closed, skipped, runs = (Waiting(name, name, 0, 0.0) for name in ("closed", "skipped", "runs"))
    for request in (closed, skipped, runs):
        bed.ours.add_request(request)
    bed.open_groups.update(skipped=None, runs=None)
    assert [bed.ours.pop_request(), bed.ours.pop_request()] == [skipped, runs]
    bed.ours.prepend_requests([skipped])
    assert list(bed.ours) == [closed, skipped]
    assert bed.places.take_popped() == ["runs"]


def test_the_queue_notes_whether_vllm_came_to_its_end() -> None:
    bed = Bed(SchedulingPolicy.FCFS)
    for name, group in (("closed", "a"), ("runs", None), ("later", None)):
        bed.ours.add_request(Waiting(name, group, 0, 0.0))
    bed.places.begin_step()
    assert bed.ours
    bed.ours.peek_request()
    bed.ours.pop_request()
    assert (bed.places.reached, bed.places.is_exhausted) == ((1, 0, 2, ""), False)
    bed.ours.pop_request()
    assert not bed.ours
    assert bed.places.is_exhausted


def test_requests_that_leave_a_closed_group_leave_no_memory() -> None:
    bed = Bed(SchedulingPolicy.FCFS)
    stays = Waiting("stays", "a", 0, 0.0)
    bed.ours.add_request(stays)
    for number in range(1000):
        for group in ("a", CLOSED):
            request = Waiting(f"{number}-{group}", group, 0, 0.0)  # type: ignore[arg-type]
            bed.ours.add_request(request)
            bed.ours.remove_request(request)
    assert len(bed.ours._groups["a"]._heap) < 100
    assert list(bed.ours._groups) == ["a"]
    with pytest.raises(ValueError, match="is not in the queue"):
        bed.ours.remove_request(request)
    with pytest.raises(IndexError):
        bed.ours.peek_request()
