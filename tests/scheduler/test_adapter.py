from __future__ import annotations

from concurrent.futures import Future

from lora_plugins.scheduler.adapter import Adapter, Held, HostState, LoadCall, Run
from lora_plugins.scheduler.request_queue import LAST, Order
from lora_plugins.scheduler.stats import FoundIn
from tests.scheduler.simulated import spec


def loaded(**options) -> Adapter:
    return Adapter(spec(1), 1, residency=HostState.LOADED, **options)


def test_an_adapter_that_runs_waits_or_is_written_is_used() -> None:
    assert not loaded().is_used
    assert not Adapter(spec(1), 1).is_used
    assert loaded(running={"r": Run(0.0, "", 0)}).is_used
    assert loaded(slot=0).is_used
    assert loaded(calls=[LoadCall(Future(), LAST)]).is_used
    assert loaded(is_pinned=True).is_unevictable


def test_who_only_waits_can_be_displaced() -> None:
    adapter = loaded(slot=0, is_active=True)
    adapter.hold("r", Held(None, 0.0, FoundIn.SLOT, LAST))
    assert adapter.can_be_displaced
    adapter.running["s"] = Run(0.0, "", 0)
    assert not adapter.can_be_displaced


def place(number: float, priority: int = 0) -> Order:
    return 1, priority, number, ""


def test_the_first_waiting_request_gives_the_place() -> None:
    adapter = loaded()
    for number, (name, priority) in enumerate([("a", 2), ("b", -1), ("c", 1)]):
        adapter.hold(name, Held(name, 0.0, FoundIn.HOST, place(number, priority)))
    assert adapter.order == place(1, -1)
    adapter.unhold("b")
    assert adapter.order == place(2, 1)
    adapter.calls.append(LoadCall(Future(), place(0)))
    assert adapter.order == place(0)
    adapter.calls.clear()
    for name in ("c", "a"):
        adapter.unhold(name)
    assert not adapter.held
    assert adapter.order == LAST
