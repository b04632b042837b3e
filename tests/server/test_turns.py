"""Turns: at most so many adapters at once, first come first served, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from lora_plugins.server import turns as turns_module
from lora_plugins.server.turns import Turns
from tests.virtual_time import runs

LONG_S = 3600.0


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


async def breathe() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Queue:
    """Takes turns in tasks, and notes who got one in which order."""

    def __init__(self, slots: int, quantum_s: float = LONG_S) -> None:
        self.turns = Turns(slots, quantum_s)
        self.order: list[int] = []

    async def ask(self, adapter_id: int) -> asyncio.Task[None]:
        async def take() -> None:
            await self.turns.take(adapter_id)
            self.order.append(adapter_id)

        task = asyncio.create_task(take())
        await breathe()
        return task

    async def give_back(self, adapter_id: int) -> None:
        self.turns.give_back(adapter_id)
        await breathe()

    def is_idle(self) -> bool:
        return not self.turns.in_flight() and not self.turns._waiting


@runs
async def test_as_many_adapters_as_slots_go_in_at_once() -> None:
    queue = Queue(slots=2)
    for adapter_id in (1, 1, 2, 3, 2):
        await queue.ask(adapter_id)
    assert queue.order == [1, 1, 2, 2], "who has a turn goes on within its quantum"
    assert queue.turns.in_flight() == [1, 2]
    await queue.give_back(1)
    assert queue.order == [1, 1, 2, 2], "one of its requests is still there"
    await queue.give_back(1)
    assert queue.order == [1, 1, 2, 2, 3]


@runs
async def test_first_come_first_served_and_all_requests_of_one_together() -> None:
    queue = Queue(slots=1)
    for adapter_id in (1, 2, 3, 2, 4):
        await queue.ask(adapter_id)
    for expected in ([1, 2, 2], [1, 2, 2], [1, 2, 2, 3], [1, 2, 2, 3, 4]):
        await queue.give_back(queue.order[-1] if queue.order[-1] != 2 else 2)
        assert queue.order == expected
    assert queue.turns.in_flight() == [4]


def test_try_take_lets_nobody_past_who_waits(clock: Clock) -> None:
    async def run() -> None:
        queue = Queue(slots=2)
        assert queue.turns.try_take(1)
        assert queue.turns.try_take(2)
        assert not queue.turns.try_take(3)
        waiting = await queue.ask(3)
        await queue.give_back(1)
        assert queue.order == [3]
        other = await queue.ask(4)
        queue.turns.give_back(2)  # 4 is let in by this
        assert not queue.turns.try_take(5)
        await asyncio.gather(waiting, other)

    asyncio.run(run())


def test_within_its_quantum_an_adapter_goes_on_and_then_no_more(clock: Clock) -> None:
    async def run() -> None:
        queue = Queue(slots=1, quantum_s=1.0)
        await queue.ask(1)
        await queue.ask(2)
        clock.now_s += 0.9
        await queue.ask(1)
        assert queue.order == [1, 1]
        clock.now_s += 0.2
        late = await queue.ask(1)
        assert queue.order == [1, 1]
        await queue.give_back(1)
        await queue.give_back(1)
        assert queue.order == [1, 1, 2]
        assert not late.done(), "it waits behind the other, although it came as its own turn was on"
        await queue.give_back(2)
        assert queue.order == [1, 1, 2, 1]

    asyncio.run(run())


def test_without_others_a_turn_lasts(clock: Clock) -> None:
    async def run() -> None:
        queue = Queue(slots=1, quantum_s=1.0)
        await queue.ask(1)
        clock.now_s += 100
        await queue.ask(1)
        assert queue.order == [1, 1]
        await queue.ask(2)
        await queue.ask(1)  # its quantum is long over
        assert queue.order == [1, 1]

    asyncio.run(run())


def test_one_at_the_head_of_the_queue_begins_a_new_quantum(clock: Clock) -> None:
    async def run() -> None:
        queue = Queue(slots=2, quantum_s=1.0)
        for adapter_id in (1, 2, 3):
            await queue.ask(adapter_id)
        clock.now_s += 2
        await queue.ask(1)
        assert queue.order == [1, 2]
        await queue.give_back(2)
        assert queue.order == [1, 2, 3, 1], "nobody stands before it any more"

    asyncio.run(run())


@runs
async def test_a_hot_adapter_keeps_nobody_out_for_longer_than_its_quantum_and_request() -> None:
    """More hot adapters than slots, none of them ever idle: each waits for at most those before it.

    Bound: a waiter has at most `hot` adapters before it, which leave in rounds of `slots`, each round lasting for
    a quantum and one request, in which the last one that was let in ends.
    """
    slots, hot, quantum_s, request_s = 2, 6, 0.03, 0.02
    turns = Turns(slots, quantum_s)
    stop = asyncio.Event()
    waits: dict[int, list[float]] = {adapter_id: [] for adapter_id in range(hot)}

    async def client(adapter_id: int, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        while not stop.is_set():
            asked = time.monotonic()
            await turns.take(adapter_id)
            waits[adapter_id].append(time.monotonic() - asked)
            await asyncio.sleep(request_s)
            turns.give_back(adapter_id)

    clients = [asyncio.create_task(client(key, n * request_s / 3)) for key in range(hot) for n in range(3)]
    await asyncio.sleep(1.5)
    stop.set()
    await asyncio.gather(*clients)
    bound_s = (hot / slots) * (quantum_s + request_s)
    assert max(max(each) for each in waits.values()) <= bound_s + 1e-9
    served = [len(each) for each in waits.values()]
    assert min(served) > 10
    assert max(served) < 2 * min(served), served
    assert not turns.in_flight()


@runs
async def test_one_slot_and_a_stream_that_is_never_idle() -> None:
    turns, stop = Turns(1, 0.05), asyncio.Event()

    async def client(offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        while not stop.is_set():
            await turns.take(0)
            await asyncio.sleep(0.03)
            turns.give_back(0)

    clients = [asyncio.create_task(client(n * 0.01)) for n in range(3)]
    await asyncio.sleep(0.1)
    await asyncio.wait_for(turns.take(1), 1)
    turns.give_back(1)
    stop.set()
    await asyncio.gather(*clients)


# --- cancellation ---


@runs
async def test_one_that_goes_away_while_it_waits() -> None:
    queue = Queue(slots=1)
    await queue.ask(1)
    gone = await queue.ask(2)
    other = await queue.ask(2)
    behind = await queue.ask(3)
    gone.cancel()
    await breathe()
    await queue.give_back(1)
    assert queue.order == [1, 2]
    await queue.give_back(2)
    assert queue.order == [1, 2, 3]
    await asyncio.gather(other, behind)
    await queue.give_back(3)
    assert queue.is_idle()


@runs
async def test_the_last_of_the_first_in_line_goes_away_and_the_next_moves_up() -> None:
    queue = Queue(slots=2, quantum_s=0.0)
    await queue.ask(1)
    await queue.ask(2)
    gone = await queue.ask(3)
    again = await queue.ask(1)  # stands behind 3
    assert queue.order == [1, 2]
    gone.cancel()
    await breathe()
    assert again.done()
    assert queue.order == [1, 2, 1]


@runs
async def test_one_that_goes_away_in_the_moment_of_its_turn_passes_it_on() -> None:
    queue = Queue(slots=1)
    await queue.ask(1)
    gone, behind = await queue.ask(2), await queue.ask(3)
    queue.turns.give_back(1)  # its place is granted, but it has not run yet
    gone.cancel()
    await breathe()
    assert gone.cancelled()
    assert behind.done()
    assert queue.turns.in_flight() == [3]


@runs
async def test_one_cancelled_before_it_began() -> None:
    queue = Queue(slots=1)
    await queue.ask(1)
    task = asyncio.create_task(queue.turns.take(2))
    task.cancel()
    await breathe()
    await queue.give_back(1)
    assert queue.is_idle()


# --- room ---


@runs
async def test_while_somebody_lacks_room_nobody_else_gets_a_turn() -> None:
    queue = Queue(slots=3, quantum_s=0.0)
    await queue.ask(1)
    with queue.turns.lacking_room():
        assert not queue.turns.try_take(2)
        second, more = await queue.ask(2), await queue.ask(1)
        with queue.turns.lacking_room():
            pass
        await breathe()
        assert queue.order == [1], "one of two still lacks it"
        await queue.give_back(1)
        assert not second.done()
    await breathe()
    assert queue.order == [1, 2, 1]
    await asyncio.gather(second, more)


@runs
async def test_while_somebody_lacks_room_a_turn_lasts_for_its_quantum() -> None:
    queue = Queue(slots=3, quantum_s=LONG_S)
    await queue.ask(1)
    with queue.turns.lacking_room():
        assert queue.turns.try_take(1)


@runs
async def test_room_is_not_lacked_any_more_after_an_error() -> None:
    queue = Queue(slots=2)
    with contextlib.suppress(ZeroDivisionError), queue.turns.lacking_room():
        waiting = await queue.ask(1)
        raise ZeroDivisionError
    await breathe()
    assert waiting.done()


# --- any order ---


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events(seed: int, clock: Clock) -> None:
    """Requests come, go away and end, room is lacked, time passes: limits hold, nobody is forgotten, all drains."""
    choose = random.Random(seed)
    slots, quantum_s = choose.randint(1, 4), choose.choice([0.0, 1.0, LONG_S])

    async def run() -> None:
        turns = Turns(slots, quantum_s)
        waiting: dict[asyncio.Task[None], int] = {}
        running: list[int] = []
        lacking = contextlib.ExitStack()
        lacks = 0

        def collect() -> None:
            for task in [task for task in waiting if task.done()]:
                adapter_id = waiting.pop(task)
                if not task.cancelled():
                    running.append(adapter_id)

        def check() -> None:
            assert set(turns.in_flight()) == set(running)
            assert len(turns.in_flight()) <= slots
            assert set(turns._waiting) == set(waiting.values())
            if waiting and not lacks:
                first = next(iter(turns._waiting))
                assert len(turns.in_flight()) == slots, "a slot is free and somebody waits"
                assert first not in turns.in_flight(), "nobody stands before it"

        for _ in range(200):
            match choose.choice(["ask", "ask", "ask", "end", "end", "go away", "late", "lack", "have"]):
                case "ask":
                    adapter_id = choose.randint(1, 6)
                    waiting[asyncio.create_task(turns.take(adapter_id))] = adapter_id
                case "end" if running:
                    turns.give_back(running.pop(choose.randrange(len(running))))
                case "go away" if waiting:
                    choose.choice(list(waiting)).cancel()
                case "late":
                    clock.now_s += choose.choice([0.1, 1.1])
                case "lack":
                    lacking.enter_context(turns.lacking_room())
                    lacks += 1
                case "have":
                    lacking.close()
                    lacks = 0
            if choose.random() < 0.7:  # else the next thing happens before anybody has run
                await breathe()
                collect()
                check()
        lacking.close()
        lacks = 0
        await breathe()
        collect()
        while running or waiting:
            assert running, "somebody waits, and nobody is there to wait for"
            turns.give_back(running.pop())
            await breathe()
            collect()
            check()
        assert not turns.in_flight()
        assert not turns._waiting

    asyncio.run(run())


@runs
async def test_a_pinned_adapter_takes_nobodys_turn():
    queue = Queue(slots=1)
    queue.turns.pinned = frozenset({1})
    for adapter_id in (1, 2, 1):
        await queue.ask(adapter_id)
    assert queue.order == [1, 2, 1]
    third = await queue.ask(3)
    assert not third.done()
    await queue.ask(1)  # though another waits
    assert queue.order == [1, 2, 1, 1]
    for _ in range(3):
        await queue.give_back(1)
    assert not third.done()
    await queue.give_back(2)
    assert third.done()


@runs
async def test_unpinned_while_it_has_requests_it_is_one_of_all():
    queue = Queue(slots=1)
    queue.turns.pinned = frozenset({1})
    await queue.ask(1)
    queue.turns.slots, queue.turns.pinned = 2, frozenset()
    for adapter_id in (2, 3):
        await queue.ask(adapter_id)
    assert queue.order == [1, 2]
    await queue.give_back(1)
    assert queue.order == [1, 2, 3]
