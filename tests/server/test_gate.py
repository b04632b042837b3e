"""The gate before a made-up set of workers: who is let in when, who keeps a lease, and what an error does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.server import gate as gate_module
from lora_plugins.server.gate import Gate
from tests.virtual_time import runs

LINGER_S = 0.05


@dataclass(frozen=True)
class Asked:
    lora_int_id: int
    lora_path: str = "/somewhere"

    @property
    def lora_name(self) -> str:
        return f"adapter-{self.lora_int_id}"


@dataclass
class Worker:
    """Holds `places` adapters in host memory, those that are leased for as long as they are, and `slots` of them.

    One that is asked for is staged after `delay_s`, or has failed; it gets a slot of none of the busy, if one is idle.
    The `large` take all places; what has landed once is known to.
    """

    delay_s: float = 0.01
    places: int = 99
    slots: int = 99
    broken: LoRAPluginsError | None = None
    large: set[int] = field(default_factory=set)
    known_large: set[int] = field(default_factory=set)
    paths: dict[int, str] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)
    leases: dict[int, set[str]] = field(default_factory=dict)
    stagings: Counter[tuple[int, str]] = field(default_factory=Counter)
    in_slots: list[int] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    uris: dict[int, str | None] = field(default_factory=dict)

    def lora_plugins_stage(
        self, owner: str, name: str, adapter_id: int, path: str, origin: dict[str, Any], busy: list[int] | None
    ) -> dict[str, Any]:
        assert origin["size_bytes"] == 0, "there is no such directory"
        self.uris[adapter_id] = origin.get("uri")
        if self.paths.get(adapter_id) != path:
            if adapter_id not in self.paths and not self.make_room(1):
                return failure(NoFreeSlot("all leased", adapter=name))
            if adapter_id in self.known_large and not self.make_room(self.places):
                return failure(NoFreeSlot("all leased", adapter=name))
            self.forget(adapter_id)
            self.paths[adapter_id], self.leases[adapter_id] = path, set()
            self.ready_at[adapter_id] = asyncio.get_running_loop().time() + self.delay_s
            self.stagings[adapter_id, path] += 1
        self.leases[adapter_id].add(owner)
        return self.lora_plugins_stage_state(adapter_id, busy)

    def lora_plugins_stage_state(self, adapter_id: int, busy: list[int] | None) -> dict[str, Any]:
        if adapter_id not in self.paths:
            return {"state": "absent"}
        if asyncio.get_running_loop().time() < self.ready_at[adapter_id]:
            return {"state": "staging", "displaced": []}
        error = self.broken
        if adapter_id in self.large and not self.make_room(self.places, but=adapter_id):
            self.known_large.add(adapter_id)
            error = NoFreeSlot("landed larger than was reserved")
        if error is not None:
            self.paths[adapter_id] = "failed; the next staging begins anew"
            return failure(error)
        displaced = []
        if busy is not None and adapter_id not in self.in_slots:
            if len(self.in_slots) >= self.slots:
                displaced = [key for key in self.in_slots if key not in busy and key not in self.pinned][:1]
            for key in displaced:
                self.in_slots.remove(key)
            if len(self.in_slots) < self.slots:
                self.in_slots.append(adapter_id)
        state = "ready" if adapter_id in self.in_slots else "staged"
        pinned = sorted(self.pinned)
        return {"state": state, "displaced": displaced, "pinned": pinned, "unpinned_slots": self.slots - len(pinned)}

    def lora_plugins_release(self, owner: str, adapter_id: int) -> None:
        if adapter_id in self.leases:
            self.leases[adapter_id].discard(owner)

    def lora_plugins_remove(self, owner: str, adapter_id: int) -> None:
        self.lora_plugins_release(owner, adapter_id)
        if adapter_id in self.paths and not self.leases[adapter_id]:
            self.forget(adapter_id)

    def lora_plugins_pin(self, adapter_id: int) -> bool:
        assert self.is_ready(adapter_id)
        self.pinned.add(adapter_id)
        return True

    def lora_plugins_unpin(self, adapter_id: int) -> bool:
        self.pinned.discard(adapter_id)
        return True

    def lora_plugins_residency(self) -> dict[int, dict[str, Any]]:
        return {
            key: {
                "size_bytes": 10,
                "leases": len(self.leases[key]),
                "staged": True,
                "slot": key in self.in_slots,
                "pinned": key in self.pinned,
            }
            for key in self.paths
        }

    def make_room(self, places: int, but: int | None = None) -> bool:
        """Forget who is not leased until there are so many free places, if that is possible."""
        others = [key for key in self.paths if key != but]
        idle = [key for key in others if not self.leases[key]]
        lacking = len(others) + places - self.places
        if lacking > len(idle):
            return False
        for key in idle[: max(lacking, 0)]:
            self.forget(key)
        return True

    def forget(self, adapter_id: int) -> None:
        for of_all in (self.paths, self.ready_at, self.leases):
            of_all.pop(adapter_id, None)
        if adapter_id in self.in_slots:
            self.in_slots.remove(adapter_id)

    def is_ready(self, adapter_id: int) -> bool:
        return self.lora_plugins_stage_state(adapter_id, None)["state"] == "ready"


def failure(error: LoRAPluginsError) -> dict[str, Any]:
    return {"state": "failed", "kind": type(error).__name__, "fields": error.fields()}


class Workers:
    """A gate before some workers; counts the calls."""

    def __init__(self, *workers: Worker, **options: Any) -> None:
        self.workers = workers
        self.calls: Counter[str] = Counter()
        slots = options.pop("slots", min(worker.slots for worker in workers))
        self.gate = Gate(self.call, slots=slots, linger_s=options.pop("linger_s", LINGER_S), **options)
        self.inside: Counter[int] = Counter()

    async def call(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        self.calls[method] += 1
        answers = [getattr(worker, method)(*arguments) for worker in self.workers]
        await asyncio.sleep(0.001)
        return answers

    def leased(self) -> set[int]:
        return {key for worker in self.workers for key, owners in worker.leases.items() if owners}

    async def use(self, request: Asked, seconds: float = 0.0) -> None:
        async with self.gate.held(request):
            self.inside[request.lora_int_id] += 1
            try:
                self.everybody_inside_is_leased()
                await asyncio.sleep(seconds)
                self.everybody_inside_is_leased()
            finally:
                self.inside[request.lora_int_id] -= 1

    def everybody_inside_is_leased(self) -> None:
        """What the gate is for: the engine never meets an adapter that a worker may have dropped."""
        for worker in self.workers:
            for adapter_id in +self.inside:
                assert worker.leases.get(adapter_id), f"adapter {adapter_id} runs without a lease"

    async def nothing_is_left(self) -> None:
        async with asyncio.timeout(2):
            while self.leased() or self.gate._leases:
                await asyncio.sleep(0.005)
        assert not self.gate._staging._next_for_room.locked()
        assert not self.gate._turns.in_flight()
        assert not self.gate._turns._waiting
        assert not self.gate._turns._lacking_room


@runs
async def test_fifty_at_once_stage_once() -> None:
    workers = Workers(Worker(), Worker())
    await asyncio.gather(*(workers.use(Asked(1)) for _ in range(50)))
    assert workers.calls["lora_plugins_stage"] == 1
    assert [worker.stagings.total() for worker in workers.workers] == [1, 1]
    await workers.nothing_is_left()
    assert workers.calls["lora_plugins_release"] == 1


@runs
async def test_nobody_enters_before_the_slowest_worker_is_ready() -> None:
    workers = Workers(Worker(delay_s=0.0), Worker(delay_s=0.15))
    started = asyncio.get_running_loop().time()

    async def enter() -> None:
        await workers.gate.enter(Asked(1))
        assert all(worker.is_ready(1) for worker in workers.workers)

    await asyncio.gather(*(enter() for _ in range(5)))
    assert asyncio.get_running_loop().time() - started >= 0.15


@runs
async def test_others_do_not_wait_for_a_slow_one() -> None:
    worker = Worker()
    workers = Workers(worker)
    await workers.use(Asked(2))
    worker.delay_s = 5
    slow = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.02)
    worker.delay_s = 0
    await asyncio.wait_for(asyncio.gather(workers.use(Asked(2)), workers.use(Asked(3))), 1)
    assert not slow.done()
    slow.cancel()


@runs
async def test_the_lease_ends_after_the_last_leave_and_the_linger() -> None:
    workers = Workers(Worker(delay_s=0.0))
    first, second = await workers.gate.enter(Asked(1)), await workers.gate.enter(Asked(1))
    workers.gate.leave(first)
    await asyncio.sleep(3 * LINGER_S)
    assert workers.leased() == {1}
    workers.gate.leave(second)
    await asyncio.sleep(LINGER_S / 3)
    assert workers.leased() == {1}
    await asyncio.sleep(2 * LINGER_S)
    assert workers.leased() == set()


@runs
async def test_coming_back_during_the_linger_needs_no_call() -> None:
    workers = Workers(Worker(delay_s=0.0))
    for _ in range(5):
        await workers.use(Asked(1))
        before = workers.calls.total()
        await asyncio.sleep(LINGER_S / 3)
        await workers.use(Asked(1))
        assert workers.calls.total() == before
    assert workers.calls["lora_plugins_stage"] == 1


@runs
async def test_what_a_request_raises_ends_its_hold() -> None:
    workers = Workers(Worker(delay_s=0.0))
    with pytest.raises(ZeroDivisionError):
        async with workers.gate.held(Asked(1)):
            raise ZeroDivisionError
    await workers.nothing_is_left()


# --- turns ---


@runs
async def test_more_adapters_than_slots_are_served_in_order() -> None:
    workers = Workers(Worker(slots=2, delay_s=0.0), Worker(slots=2, delay_s=0.01))
    order: list[int] = []

    async def one(adapter_id: int) -> None:
        async with workers.gate.held(Asked(adapter_id)):
            order.append(adapter_id)
            assert len(workers.gate._turns.in_flight()) <= 2
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        for adapter_id in range(12):
            group.create_task(one(adapter_id))
            await asyncio.sleep(0.005)
    assert order == list(range(12))
    await workers.nothing_is_left()


@runs
async def test_a_pinned_adapter_leaves_the_other_slots_to_the_others() -> None:
    worker = Worker(slots=2)
    workers = Workers(worker)
    await workers.use(Asked(1))
    worker.lora_plugins_pin(1)
    await workers.use(Asked(2))  # whose answers say what is pinned
    async with workers.gate.held(Asked(1)), asyncio.timeout(LINGER_S):
        await workers.use(Asked(3))
    await workers.nothing_is_left()


@runs
async def test_one_that_waits_for_its_turn_is_staged_meanwhile() -> None:
    workers = Workers(Worker(slots=1, delay_s=0.05))
    hold = await workers.gate.enter(Asked(0))
    waiting = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.15)
    assert workers.workers[0].lora_plugins_stage_state(1, None)["state"] == "staged"
    assert workers.workers[0].in_slots == [0], "its slot comes with its turn"
    workers.gate.leave(hold)
    await waiting
    await workers.nothing_is_left()


@runs
async def test_one_that_cannot_be_staged_is_told_before_its_turn() -> None:
    worker = Worker(slots=1, delay_s=0.0)
    workers = Workers(worker)
    hold = await workers.gate.enter(Asked(0))
    worker.broken = IncompatibleAdapter("rank 99")
    outcomes = await asyncio.wait_for(
        asyncio.gather(*(workers.use(Asked(1)) for _ in range(3)), return_exceptions=True), 1
    )
    assert [type(outcome) for outcome in outcomes] == [IncompatibleAdapter] * 3
    assert workers.gate._turns.in_flight() == [0]
    assert not workers.gate._turns._waiting
    workers.gate.leave(hold)
    await workers.nothing_is_left()


@runs
async def test_adapters_that_are_never_idle_do_not_keep_another_out() -> None:
    workers = Workers(Worker(slots=1, delay_s=0.0), quantum_s=0.1)
    stop = asyncio.Event()

    async def stream(offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        while not stop.is_set():
            await workers.use(Asked(0), 0.05)

    streams = [asyncio.create_task(stream(offset_s)) for offset_s in (0, 0.02, 0.04)]
    await asyncio.sleep(0.1)
    await asyncio.wait_for(workers.use(Asked(1)), 1)
    stop.set()
    await asyncio.gather(*streams)
    await workers.nothing_is_left()


@runs
async def test_a_displaced_adapter_is_placed_again() -> None:
    worker = Worker(slots=1, delay_s=0.0)
    workers = Workers(worker, linger_s=10)
    await workers.use(Asked(0))
    await workers.use(Asked(1))
    assert worker.in_slots == [1]
    async with workers.gate.held(Asked(0)):
        assert worker.in_slots == [0]
    assert worker.stagings[0, "/somewhere"] == 1, "it was still in host memory"


# --- those who go away ---


@runs
async def test_one_cancelled_waiter_leaves_the_others_waiting() -> None:
    workers = Workers(Worker(delay_s=0.1))
    tasks = [asyncio.create_task(workers.use(Asked(1))) for _ in range(3)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()
    assert workers.calls["lora_plugins_stage"] == 1
    await workers.nothing_is_left()


@runs
async def test_a_waiter_that_disappears_leaves_no_lease() -> None:
    for waited_s in (0.0, 0.0005, 0.003, 0.02):
        workers = Workers(Worker(delay_s=0.5))
        task = asyncio.create_task(workers.use(Asked(1)))
        await asyncio.sleep(waited_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(3 * LINGER_S)
        await workers.nothing_is_left()


@runs
async def test_one_that_disappears_while_it_waits_for_room_takes_none() -> None:
    workers = Workers(Worker(places=1, slots=2, delay_s=0.0))
    hold = await workers.gate.enter(Asked(0))
    task = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(2 * LINGER_S)
    workers.gate.leave(hold)
    await workers.nothing_is_left()
    assert (1, "/somewhere") not in workers.workers[0].stagings


@runs
async def test_one_that_disappears_while_it_waits_for_its_turn_takes_none() -> None:
    for waited_s in (0.0, 0.0005, 0.003, 0.02, 0.06):
        workers = Workers(Worker(slots=1, delay_s=0.02))
        hold = await workers.gate.enter(Asked(0))
        task = asyncio.create_task(workers.use(Asked(1)))
        await asyncio.sleep(waited_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await workers.use(Asked(0))
        workers.gate.leave(hold)
        await workers.nothing_is_left()


@runs
async def test_coming_back_after_all_disappeared() -> None:
    workers = Workers(Worker(delay_s=0.05))
    task = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.01)
    task.cancel()
    await workers.use(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_any_of_many_may_go_away_at_any_moment() -> None:
    """A random schedule: everybody inside is leased, everybody else gets in, and nothing is left over."""
    for seed in range(12):
        choose = random.Random(seed)
        slots = choose.randint(1, 3)
        workers = Workers(
            Worker(slots=slots, places=choose.randint(1, slots + 1), delay_s=choose.choice([0.0, 0.01])),
            Worker(slots=slots, places=choose.randint(1, slots + 1), delay_s=choose.choice([0.0, 0.01])),
            quantum_s=choose.choice([0.0, 0.02]),
            linger_s=choose.choice([0.0, 0.01]),
        )
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(workers.use(Asked(choose.randint(1, 5)), choose.choice([0.0, 0.01]))))
            await asyncio.sleep(choose.choice([0.0, 0.0, 0.003]))
            if choose.random() < 0.4:
                choose.choice(tasks).cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}, outcomes
        await workers.nothing_is_left()


# --- tickets ---


@runs
async def test_who_was_admitted_enters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(slots=1, delay_s=0.0)
    workers = Workers(worker, quantum_s=0.0)
    await workers.gate.admit(Asked(1))
    other = asyncio.create_task(workers.use(Asked(2)))
    await asyncio.sleep(0.05)
    assert not other.done(), "the turn is the admitted one's"
    before = workers.calls.total()
    hold = await asyncio.wait_for(workers.gate.enter(Asked(1)), 0.1)
    assert workers.calls.total() == before
    workers.gate.leave(hold)
    await other
    await workers.nothing_is_left()


@runs
async def test_who_was_admitted_and_does_not_come_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "TICKET_S", 0.1)
    workers = Workers(Worker(slots=1, delay_s=0.0))
    for _ in range(3):
        await workers.gate.admit(Asked(1))
        await asyncio.sleep(0.02)
    hold = await workers.gate.enter(Asked(1))  # the first one's
    await asyncio.sleep(0.15)
    assert workers.gate._turns.in_flight() == [1]
    workers.gate.leave(hold)
    assert not workers.gate._turns.in_flight()
    await workers.nothing_is_left()


@runs
async def test_who_is_refused_gets_no_ticket() -> None:
    workers = Workers(Worker(broken=IncompatibleAdapter("x")))
    with pytest.raises(IncompatibleAdapter):
        await workers.gate.admit(Asked(1))
    await workers.nothing_is_left()


# --- for those who change what is served ---


@runs
async def test_what_is_retired_goes_when_its_last_request_has_left() -> None:
    workers = Workers(Worker(), linger_s=30)
    first = await workers.gate.enter(Asked(0), "a")
    second = await workers.gate.enter(Asked(0), "b")
    assert sorted(workers.gate.in_flight(0)) == ["a", "b"]
    task = asyncio.create_task(workers.gate.retire(0))
    await asyncio.sleep(0.02)
    workers.gate.leave(first)
    await asyncio.sleep(0.02)
    assert not task.done()
    assert 0 in workers.workers[0].paths
    workers.gate.leave(second)
    async with asyncio.timeout(1):
        await task
    assert workers.workers[0].paths == {}
    assert workers.gate.in_flight(0) == []


@runs
async def test_what_is_retired_while_it_lingers_or_unknown_goes_at_once() -> None:
    workers = Workers(Worker(), linger_s=30)
    await workers.use(Asked(0))
    async with asyncio.timeout(1):
        await workers.gate.retire(0)
        await workers.gate.retire(7)
    assert workers.workers[0].paths == {}


@runs
async def test_a_late_request_for_what_is_retired_is_served_and_leaves_nothing() -> None:
    workers = Workers(Worker(), linger_s=30)
    await workers.use(Asked(0))
    await workers.gate.retire(0)
    await workers.use(Asked(0), 0.02)
    await asyncio.sleep(0.05)
    assert workers.workers[0].paths == {}


@runs
async def test_a_request_that_is_ended_is_not_in_flight() -> None:
    workers = Workers(Worker())
    task = asyncio.create_task(workers.use(Asked(0), 30))
    await asyncio.sleep(0.05)
    assert len(workers.gate.in_flight(0)) == 1
    task.cancel()
    await asyncio.sleep(0.02)
    assert workers.gate.in_flight(0) == []
    await workers.nothing_is_left()
