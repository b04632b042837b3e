"""What an API server asks of its engines' planners: of all engines alike, and an error of one fails all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lora_plugins.errors import IncompatibleAdapter, NoFreeSlot
from lora_plugins.events import AdapterLoaded, Event, Events, NotServed
from lora_plugins.lifecycle.planner_client import AdapterStates, PlannerClient
from lora_plugins.scheduler.messages import AdapterState
from tests.lifecycle.simulated_engine import SimulatedEngine, ask_all
from tests.virtual_time import runs


@dataclass(frozen=True)
class Request:
    lora_name: str = "sql"
    lora_int_id: int = 1
    lora_path: str = "/store/sql"


@dataclass
class Engines:
    """Several engines behind one API server, which asks them at once."""

    engines: list[SimulatedEngine]
    told: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = PlannerClient(ask_all(self.engines), Events(self.told.append))


@runs
async def test_a_load_is_of_every_engine_and_reported_once() -> None:
    engines = Engines([SimulatedEngine(delay_s=0.1, size_bytes=7), SimulatedEngine(delay_s=0.3, size_bytes=5)])
    await engines.client.load(Request(), uri="s3://b/sql")
    assert [engine.worker.loaded for engine in engines.engines] == [{1}, {1}]
    assert [engine.worker.uris["/store/sql"] for engine in engines.engines] == ["s3://b/sql"] * 2
    (ready,) = engines.told
    assert ready == AdapterLoaded("sql", "/store/sql", 7, 0.3)


@runs
async def test_further_loads_are_the_first_one() -> None:
    engines = Engines([SimulatedEngine(delay_s=0.1)])
    await engines.client.load(Request())
    await asyncio.gather(*(engines.client.load(Request()) for _ in range(10)))
    assert len(engines.told) == 1
    assert engines.engines[0].worker.loads.total() == 1


@runs
async def test_a_load_takes_an_idle_slot_where_it_wants_one() -> None:
    engines = Engines([SimulatedEngine()])
    await engines.client.load(Request())
    await engines.client.load(Request("chat", 2, "/store/chat"), wants_slot=False)
    state_of = await engines.client.states()
    assert (state_of(1).is_active, state_of(2).is_active) == (True, False)
    assert state_of(1).is_loaded
    assert state_of(2).is_loaded


@runs
async def test_an_error_of_one_engine_fails_the_load() -> None:
    error = IncompatibleAdapter("rank 99", expected="rank 8", remedy="train again", adapter="sql")
    engines = Engines([SimulatedEngine(), SimulatedEngine(broken=error)])
    with pytest.raises(IncompatibleAdapter) as caught:
        await engines.client.load(Request())
    assert str(caught.value) == str(error), "every part of it"
    (refused,) = engines.told
    assert isinstance(refused, NotServed)
    assert refused.stage == "load"
    assert (refused.name, str(refused.error)) == ("sql", str(error))


@runs
async def test_a_pin_that_fails_in_one_engine_is_none() -> None:
    engines = Engines([SimulatedEngine(slots=3), SimulatedEngine(slots=1)])
    with pytest.raises(NoFreeSlot, match="1 slots, of which 0 are pinned"):
        await engines.client.pin(Request())
    await asyncio.sleep(1)
    assert [engine.pinned for engine in engines.engines] == [set(), set()]
    assert not (await engines.client.states())(1).is_pinned


@runs
async def test_a_pin_is_in_every_engine_until_it_is_unpinned() -> None:
    engines = Engines([SimulatedEngine(slots=3), SimulatedEngine(slots=3)])
    await engines.client.pin(Request())
    assert (await engines.client.states())(1) == state(is_pinned=True)
    await engines.client.unpin(1)
    assert [engine.pinned for engine in engines.engines] == [set(), set()]


@runs
async def test_what_is_unknown_is_retired_at_once() -> None:
    engines = Engines([SimulatedEngine()])
    await engines.client.retire(7)
    await engines.client.retire(7, NoFreeSlot("gone"))
    assert (await engines.client.states())(7) == AdapterState(7, "")


@runs
async def test_places_say_what_is_held_and_what_runs() -> None:
    engines = Engines([SimulatedEngine(slots=1)])
    (engine,) = engines.engines
    requests = [Request(), Request("chat", 2, "/store/chat")]
    for request in requests:
        await engines.client.load(request)
    tasks = [asyncio.create_task(engine.run(requests[0], 30, "a"))]
    await asyncio.sleep(1)
    tasks.append(asyncio.create_task(engine.run(requests[1], 1, "b")))
    await asyncio.sleep(1)
    state_of = await engines.client.states()
    assert (state_of(1).running, state_of(1).held) == (("a",), ())
    assert (state_of(2).running, state_of(2).held) == ((), ("b",))
    assert state_of.of_name("sql", 3) == AdapterState(3, "", running=("a",)), "of a version before"
    assert state_of.of_name("sql", 3, besides=[1]) == AdapterState(3, "")
    figures = await engines.client.figures()
    assert (figures[0].held, figures[0].slots) == (1, 1)
    await asyncio.gather(*tasks)


@runs
async def test_the_last_use_of_an_adapter_is_remembered() -> None:
    client = Engines([]).client
    assert client.used_at.get(1) is None
    client.used(Request())
    assert client.used_at[1] > 1e9


def state(**changes: Any) -> AdapterState:
    return replace(AdapterState(1, "sql", 10, is_loaded=True, is_active=True), **changes)


def test_a_place_is_where_every_engine_has_it() -> None:
    slot, host = state(running=("a",)), state(is_active=False, size_bytes=12, held=("b",), running=("c",))
    assert AdapterStates([{1: slot}, {1: host}])(1) == replace(host, running=("a", "c"))
    assert AdapterStates([{1: slot}, {}])(1) == state(is_loaded=False, is_active=False, running=("a",))
    assert AdapterStates([{1: slot}])(1) == slot
    assert AdapterStates([{1: state(is_pinned=True)}, {}])(1).is_pinned
    assert AdapterStates([{}, {}])(1) == AdapterStates([])(1) == AdapterState(1, "")


@runs
async def test_a_pause_is_over_once_all_engines_say_so() -> None:
    """The next part of a client's request may have gone to an engine that had answered."""
    answers = iter([{0: True, 1: False}, {0: False, 1: True}, {0: True, 1: True}, {0: True, 1: True}])
    asked = list[tuple[Any, ...]]()

    async def ask(utility: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        asked.append((utility, arguments[0], tuple(arguments[1])))
        return next(answers)

    await PlannerClient(ask, Events()).paused("sql", ["beams"])
    assert asked == [*[("lora_plugins_paused", "sql", ("beams",))] * 3, ("lora_plugins_paused", "sql", ())]
