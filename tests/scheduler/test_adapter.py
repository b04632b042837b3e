from __future__ import annotations

from concurrent.futures import Future

from lora_plugins.scheduler.adapter import Adapter, Held, LoadCall, Residency
from lora_plugins.scheduler.stats import Found
from tests.scheduler.simulated import spec


def loaded(**options) -> Adapter:
    return Adapter(spec(1), residency=Residency.LOADED, **options)


def test_found_says_how_near_the_adapter_is() -> None:
    assert Adapter(spec(1)).found is Found.STORE
    assert Adapter(spec(1), residency=Residency.LOADING).found is Found.STORE
    assert loaded().found is Found.HOST
    assert loaded(slot=0, is_active=True).found is Found.SLOT


def test_an_adapter_in_use_is_not_idle() -> None:
    assert loaded().is_idle
    assert not Adapter(spec(1)).is_idle
    assert not loaded(running={"r": None}).is_idle
    assert not loaded(is_pinned=True).is_idle
    assert not loaded(slot=0).is_idle
    assert not loaded(calls=[LoadCall(Future())]).is_idle


def test_who_only_waits_can_be_displaced() -> None:
    adapter = loaded(slot=0, is_active=True)
    adapter.hold("r", Held(None, 0.0, Found.SLOT))
    assert adapter.can_be_displaced
    adapter.running["s"] = None
    assert not adapter.can_be_displaced


def test_the_best_priority_of_held_requests_counts() -> None:
    adapter = loaded()
    for name, priority in (("a", 2), ("b", -1), ("c", 1)):
        adapter.hold(name, Held(name, 0.0, Found.HOST, priority))
    assert adapter.priority == -1
    assert adapter.release("b") is not None
    assert adapter.release("b") is None
    assert adapter.priority == 1
    assert list(adapter.release_all()) == ["c", "a"]
    assert adapter.priority == 0
    assert not adapter.held
