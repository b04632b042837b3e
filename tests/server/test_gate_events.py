"""What the gate tells: where an adapter was found, how long its requests waited, and what had to be brought."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.events import AdapterReady, Event, Events, Found, GatePassed, GateRefused
from tests.server.test_gate import Asked, Worker, Workers
from tests.virtual_time import runs

STAGE_S = 0.1


class Telling(Worker):
    """A worker that says where it had the adapter, as ours do."""

    def lora_plugins_stage(self, owner: str, name: str, adapter_id: int, path: str, *rest: Any) -> dict[str, Any]:
        state = (
            "absent" if self.paths.get(adapter_id) != path else self.lora_plugins_stage_state(adapter_id, None)["state"]
        )
        answer = super().lora_plugins_stage(owner, name, adapter_id, path, *rest)
        if answer["state"] == "failed":
            return answer
        found = {"ready": "slot", "staged": "host"}.get(state, "store")
        return {**answer, "found": found}


class Told:
    """A gate before telling workers, and what it told."""

    def __init__(self, *workers: Worker, **options: Any) -> None:
        self.events: list[Event] = []
        self.workers = Workers(*workers, events=Events(self.events.append), **options)
        self.gate = self.workers.gate

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def found(self) -> list[Found]:
        return [event.found for event in self.of(GatePassed)]


@runs
async def test_a_cold_adapter_is_found_in_the_store_and_brought_once() -> None:
    told = Told(Telling(delay_s=STAGE_S))
    await asyncio.gather(*(told.workers.use(Asked(1)) for _ in range(5)))
    assert told.found == [Found.STORE] * 5
    for passed in told.of(GatePassed):
        assert (passed.name, passed.load) == ("adapter-1", False)
        assert STAGE_S <= passed.wait_s < 10 * STAGE_S
    (ready,) = told.of(AdapterReady)
    assert (ready.name, ready.path, ready.size_bytes) == ("adapter-1", "/somewhere", 0)
    assert STAGE_S <= ready.stage_s < 10 * STAGE_S
    assert 0 <= ready.place_s < STAGE_S


@runs
async def test_one_in_a_slot_is_found_there_at_once_and_after_its_lease_has_ended() -> None:
    told = Told(Telling(delay_s=STAGE_S))
    await told.workers.use(Asked(1))
    await told.workers.use(Asked(1))
    await told.workers.nothing_is_left()
    await told.workers.use(Asked(1))
    assert told.found == [Found.STORE, Found.SLOT, Found.SLOT]
    assert all(passed.wait_s < STAGE_S for passed in told.of(GatePassed)[1:])
    assert len(told.of(AdapterReady)) == 1


@runs
async def test_one_that_lost_its_slot_is_found_in_host_memory() -> None:
    told = Told(Telling(delay_s=0.0, slots=1), quantum_s=0.0)
    for number in (1, 2, 1, 2):
        await told.workers.use(Asked(number))
    assert told.found == [Found.STORE, Found.STORE, Found.HOST, Found.HOST]
    assert [ready.name for ready in told.of(AdapterReady)] == ["adapter-1", "adapter-2"]


@runs
async def test_where_workers_differ_the_farthest_counts() -> None:
    near, far = Telling(delay_s=0.0), Telling(delay_s=0.0)
    told = Told(near, far)
    await told.workers.use(Asked(1))
    await told.workers.nothing_is_left()
    far.forget(1)
    await told.workers.use(Asked(1))
    assert told.found == [Found.STORE, Found.STORE]


@runs
async def test_one_staged_while_it_waits_for_its_turn_was_found_in_the_store() -> None:
    told = Told(Telling(delay_s=STAGE_S, slots=1), quantum_s=0.0)
    hold = await told.gate.enter(Asked(1))
    waiting = asyncio.create_task(told.workers.use(Asked(2)))
    await asyncio.sleep(3 * STAGE_S)
    assert told.found == [Found.STORE]
    told.gate.leave(hold)
    await waiting
    assert told.found == [Found.STORE, Found.STORE]
    second = told.of(AdapterReady)[1]
    assert second.name == "adapter-2"
    assert STAGE_S <= second.stage_s < 2.5 * STAGE_S  # the wait for the turn is no part of it
    assert second.place_s < STAGE_S
    assert told.of(GatePassed)[1].wait_s >= 3 * STAGE_S


@runs
async def test_a_load_says_so() -> None:
    told = Told(Telling(delay_s=0.0))
    told.gate.leave(await told.gate.enter(Asked(1), load=True))
    told.gate.leave(await told.gate.enter(Asked(1)))
    assert [passed.load for passed in told.of(GatePassed)] == [True, False]


@runs
async def test_a_stream_passes_once_for_its_admission_and_its_entry() -> None:
    told = Told(Telling(delay_s=0.0))
    await told.gate.admit(Asked(1))
    told.gate.leave(await told.gate.enter(Asked(1)))
    assert len(told.of(GatePassed)) == 1


@runs
async def test_a_refusal_is_told_to_each_that_waited_and_nothing_is_ready() -> None:
    told = Told(Telling(delay_s=STAGE_S, broken=IncompatibleAdapter("x")))
    await asyncio.gather(*(told.workers.use(Asked(1)) for _ in range(3)), return_exceptions=True)
    assert [type(event) for event in told.events] == [GateRefused] * 3
    for refused in told.of(GateRefused):
        assert (refused.name, refused.error.code, refused.load) == ("adapter-1", "L003", False)
        assert refused.wait_s >= STAGE_S


@runs
async def test_a_client_that_goes_away_tells_nothing_and_the_next_tells_its_own_time() -> None:
    told = Told(Telling(delay_s=STAGE_S))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(told.gate.enter(Asked(1)), STAGE_S / 3)
    assert told.events == []
    await told.workers.nothing_is_left()
    await told.workers.use(Asked(1))
    for ready in told.of(AdapterReady):
        assert ready.stage_s < 2 * STAGE_S
    assert len(told.of(GatePassed)) == 1


@runs
async def test_one_that_was_given_up_and_asked_for_again_is_timed_from_then() -> None:
    told = Told(Telling(delay_s=3 * STAGE_S), linger_s=5.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(told.gate.enter(Asked(1)), STAGE_S / 2)
    await asyncio.sleep(STAGE_S)
    await told.workers.use(Asked(1))
    (ready,) = told.of(AdapterReady)
    assert STAGE_S < ready.stage_s < 2.5 * STAGE_S


@runs
async def test_one_that_failed_and_is_brought_again_is_timed_from_then() -> None:
    worker = Telling(delay_s=STAGE_S, broken=IncompatibleAdapter("x"))
    told = Told(worker, linger_s=5.0)
    with pytest.raises(IncompatibleAdapter):
        await told.workers.use(Asked(1))
    worker.broken = None
    await asyncio.sleep(2 * STAGE_S)
    await told.workers.use(Asked(1))
    (ready,) = told.of(AdapterReady)
    assert STAGE_S <= ready.stage_s < 2.5 * STAGE_S
