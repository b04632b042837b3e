"""Staging and placing by a made-up set of workers: what is brought, who makes room, and what an error does."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from lora_plugins.errors import IncompatibleAdapter, NoFreeSlot, SourceUnavailable
from lora_plugins.server import staging
from tests.server.test_gate import LINGER_S, Asked, Worker, Workers, failure
from tests.virtual_time import runs


@runs
async def test_workers_are_told_what_an_adapter_was_loaded_by() -> None:
    workers = Workers(Worker(slots=2), Worker(slots=2))
    workers.gate.uris[1] = "s3://bucket/sql"
    await asyncio.gather(workers.use(Asked(1)), workers.use(Asked(2)))
    assert [worker.uris for worker in workers.workers] == [{1: "s3://bucket/sql", 2: None}] * 2


@runs
async def test_a_failure_reaches_every_waiter_and_the_next_tries_again() -> None:
    broken = IncompatibleAdapter("rank 99", expected="at most 64", remedy="train it anew", adapter="a", file="f")
    good, bad = Worker(), Worker(broken=broken)
    workers = Workers(good, bad)
    outcomes = await asyncio.gather(*(workers.use(Asked(1)) for _ in range(20)), return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, IncompatibleAdapter)
        assert failure(error) == failure(broken)
    assert bad.stagings[1, "/somewhere"] == 1
    bad.broken = None
    await workers.use(Asked(1))
    assert bad.stagings[1, "/somewhere"] == 2
    await workers.nothing_is_left()


@runs
async def test_after_a_failure_nothing_stays_leased() -> None:
    workers = Workers(Worker(), Worker(broken=IncompatibleAdapter("x")))
    with pytest.raises(IncompatibleAdapter):
        await workers.use(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_room_for_one_and_more_slots_than_that_is_no_deadlock() -> None:
    for slots in (1, 3):
        workers = Workers(Worker(places=1, slots=slots, delay_s=0.0), Worker(places=1, slots=slots), quantum_s=0.02)
        await asyncio.gather(*(workers.use(Asked(n % 4), 0.01) for n in range(16)))
        await workers.nothing_is_left()


@runs
async def test_hot_adapters_for_which_there_is_no_room_at_once_share_it() -> None:
    workers = Workers(Worker(places=1, slots=2, delay_s=0.0), quantum_s=0.05)
    stop, served = asyncio.Event(), Counter[int]()

    async def stream(adapter_id: int) -> None:
        while not stop.is_set():
            await workers.use(Asked(adapter_id), 0.02)
            served[adapter_id] += 1

    streams = [asyncio.create_task(stream(n % 3)) for n in range(6)]
    await asyncio.sleep(1.5)
    stop.set()
    await asyncio.gather(*streams)
    assert min(served.values()) >= 5, served
    await workers.nothing_is_left()


@runs
async def test_who_waits_for_a_turn_gives_its_lease_up_for_one_that_has_it() -> None:
    worker = Worker(places=2, slots=2, delay_s=0.0)
    workers = Workers(worker, linger_s=10)
    busy = await workers.gate.enter(Asked(0))
    await workers.use(Asked(1))  # lingers, and with it its lease
    assert worker.leases == {0: {workers.gate._staging.owner}, 1: {workers.gate._staging.owner}}
    await asyncio.wait_for(workers.use(Asked(2)), 1)
    assert worker.leases.keys() == {0, 2}
    await asyncio.wait_for(workers.use(Asked(1)), 1)
    workers.gate.leave(busy)


@runs
async def test_workers_with_room_for_different_adapters_are_no_deadlock() -> None:
    """Each of two has room in one worker: neither may keep that while it waits for the other worker's."""
    left, right = Worker(places=1, delay_s=0.0), Worker(places=1, delay_s=0.0)
    workers = Workers(left, right, slots=3, room_timeout_s=5)
    right.lora_plugins_stage("another server", "", 9, "/9", {"size_bytes": 0}, None)
    first = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.02)
    right.forget(9)  # between two questions of the first
    second = asyncio.create_task(workers.use(Asked(2)))
    await asyncio.wait_for(asyncio.gather(first, second), 2)
    await workers.nothing_is_left()


@runs
async def test_a_newcomer_does_not_overtake_who_waits() -> None:
    worker = Worker(places=1, slots=3, delay_s=0.0)
    workers = Workers(worker)
    order: list[int] = []

    async def one(adapter_id: int) -> None:
        async with workers.gate.held(Asked(adapter_id)):
            order.append(adapter_id)

    hold = await workers.gate.enter(Asked(0))
    waiting = asyncio.create_task(one(1))
    await asyncio.sleep(0.07)  # between two of its questions
    workers.gate.leave(hold)
    worker.leases[0].clear()
    await asyncio.gather(waiting, one(2))
    assert order == [1, 2]


@runs
async def test_waiting_for_room_ends() -> None:
    workers = Workers(Worker(places=1, slots=2, delay_s=0.0), room_timeout_s=0.2)
    hold = await workers.gate.enter(Asked(0))
    started = asyncio.get_running_loop().time()
    with pytest.raises(NoFreeSlot) as caught:
        await workers.gate.enter(Asked(1))
    assert 0.2 <= asyncio.get_running_loop().time() - started < 1
    assert caught.value.adapter == "adapter-1"
    workers.gate.leave(hold)
    await workers.use(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_one_that_lands_larger_than_it_seemed_waits_for_room() -> None:
    """Its size was not known: its directory is on another node, or has gone."""
    workers = Workers(Worker(places=2, slots=2, large={1}), linger_s=30)
    await workers.use(Asked(0))  # idle, and leased for as long as it lingers
    async with asyncio.timeout(1):
        await workers.use(Asked(1))
    assert workers.workers[0].stagings[1, "/somewhere"] == 2
    assert workers.leased() == {1}


@runs
async def test_one_that_lands_larger_than_what_is_ever_free_is_refused_in_time() -> None:
    workers = Workers(Worker(places=2, slots=2, large={1}), room_timeout_s=0.2)
    async with workers.gate.held(Asked(0)):
        started = asyncio.get_running_loop().time()
        with pytest.raises(NoFreeSlot):
            await workers.gate.enter(Asked(1))
        assert 0.2 <= asyncio.get_running_loop().time() - started < 1
    await workers.use(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_one_that_comes_back_as_its_linger_ends_has_a_lease() -> None:
    """Whichever runs first in the event loop: the end of the linger, the release, or the request."""
    for turns_of_the_loop in range(6):
        workers = Workers(Worker(), linger_s=LINGER_S)
        await workers.use(Asked(0))
        (entry,) = workers.gate._leases.all()
        assert entry.linger is not None
        entry.linger.cancel()
        workers.gate._idle(entry)
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        await workers.use(Asked(0), 0.02)
        await workers.nothing_is_left()


@runs
async def test_one_that_loses_its_turn_and_its_lease_while_it_is_placed_gets_both_again() -> None:
    """Its first request goes away while it is placed, its second waits for a turn, and a third party lacks room."""
    worker = Worker(slots=2, delay_s=0.0)
    workers = Workers(worker, quantum_s=0.0)
    busy = await workers.gate.enter(Asked(0))
    worker.delay_s = 0.2
    first = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.02)
    third = asyncio.create_task(workers.use(Asked(2)))  # waits for a turn: there are two slots
    await asyncio.sleep(0.02)
    second = asyncio.create_task(workers.use(Asked(1), 0.1))  # behind it, as its quantum is over
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0.02)
    for entry in workers.gate._leases.all():  # what one that lacks room would do
        if entry.request.lora_int_id == 1 and workers.gate._leases.forget(entry):
            await workers.gate._staging.release(entry)
    workers.gate.leave(busy)
    await asyncio.gather(second, third)  # each looks at its lease
    await workers.nothing_is_left()


@runs
async def test_staging_needs_no_turn_and_lingers() -> None:
    workers = Workers(Worker(slots=1), linger_s=0.3)
    async with workers.gate.held(Asked(0)):  # the only slot
        await workers.gate.stage(Asked(1))
        assert workers.leased() == {0, 1}
        assert workers.workers[0].in_slots == [0]
    await workers.use(Asked(1))
    assert workers.workers[0].stagings[1, "/somewhere"] == 1, "it was there"
    await workers.nothing_is_left()


@runs
async def test_staging_where_there_is_no_room_takes_it_from_what_lingers() -> None:
    workers = Workers(Worker(places=1, slots=1), linger_s=30)
    await workers.use(Asked(0))
    async with asyncio.timeout(1):
        await workers.gate.stage(Asked(1))
    assert workers.leased() == {1}


@runs
async def test_staging_where_there_is_no_room_is_refused_in_time() -> None:
    workers = Workers(Worker(places=1, slots=1), room_timeout_s=0.1)
    async with workers.gate.held(Asked(0)):
        with pytest.raises(NoFreeSlot):
            await workers.gate.stage(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_staging_a_broken_one_says_so() -> None:
    workers = Workers(Worker(broken=IncompatibleAdapter("rank 99")))
    with pytest.raises(IncompatibleAdapter, match="rank 99"):
        await workers.gate.stage(Asked(1))
    await workers.nothing_is_left()


@runs
async def test_another_path_under_the_same_id_is_staged_anew() -> None:
    workers = Workers(Worker(delay_s=0.0))
    old = await workers.gate.enter(Asked(1, "/old"))
    new = await workers.gate.enter(Asked(1, "/new"))
    assert workers.workers[0].paths == {1: "/new"}
    workers.gate.leave(old)  # must not end the new one's lease
    await asyncio.sleep(3 * LINGER_S)
    assert workers.leased() == {1}
    workers.gate.leave(new)
    await workers.nothing_is_left()


@runs
async def test_one_that_waits_is_not_staged_over_its_successor() -> None:
    """vLLM knows an adapter by its id: what was loaded in place under it last is what all of its requests get."""
    workers = Workers(Worker(slots=1, delay_s=0.0))
    busy = await workers.gate.enter(Asked(0))
    old = asyncio.create_task(workers.use(Asked(1, "/old")))
    await asyncio.sleep(0.02)
    new = asyncio.create_task(workers.use(Asked(1, "/new")))
    await asyncio.sleep(0.02)
    workers.gate.leave(busy)
    await asyncio.gather(old, new)
    assert workers.workers[0].paths[1] == "/new"
    assert workers.workers[0].stagings[1, "/new"] == 1
    await workers.nothing_is_left()


@runs
async def test_one_that_is_removed_while_it_is_staged_is_staged_again() -> None:
    worker = Worker(delay_s=0.05)
    workers = Workers(worker)
    task = asyncio.create_task(workers.use(Asked(1)))
    await asyncio.sleep(0.02)
    worker.forget(1)
    await asyncio.wait_for(task, 1)
    assert worker.stagings[1, "/somewhere"] == 2
    await workers.nothing_is_left()


@runs
async def test_staging_without_an_end_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_STAGE_TIMEOUT_S", 0.1)
    workers = Workers(Worker(delay_s=60))
    with pytest.raises(SourceUnavailable, match="still being staged"):
        await workers.use(Asked(1))
    await workers.nothing_is_left()


def test_size_is_that_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 15)
    (tmp_path / "optimizer.pt").write_bytes(b"x" * 100)
    assert staging._size_bytes(str(tmp_path)) == 15
    assert staging._size_bytes(str(tmp_path / "gone")) == 0
