from __future__ import annotations

from concurrent.futures import Future

from lora_plugins.scheduler.adapter import Adapter, Held, HostState, LoadCall
from lora_plugins.scheduler.stats import FoundIn
from tests.scheduler.simulated import spec


def loaded(**options) -> Adapter:
    return Adapter(spec(1), 1, residency=HostState.LOADED, **options)


def test_found_says_how_near_the_adapter_is() -> None:
    assert Adapter(spec(1), 1).found is FoundIn.STORE
    assert Adapter(spec(1), 1, residency=HostState.LOADING).found is FoundIn.STORE
    assert loaded().found is FoundIn.HOST
    assert loaded(slot=0, is_active=True).found is FoundIn.SLOT


def test_an_adapter_that_runs_waits_or_is_written_is_used() -> None:
    assert not loaded().is_used
    assert not Adapter(spec(1), 1).is_used
    assert loaded(running={"r": (0.0, "")}).is_used
    assert loaded(slot=0).is_used
    assert loaded(calls=[LoadCall(Future())]).is_used
    assert loaded(is_pinned=True).is_unevictable


def test_who_only_waits_can_be_displaced() -> None:
    adapter = loaded(slot=0, is_active=True)
    adapter.hold("r", Held(None, 0.0, FoundIn.SLOT))
    assert adapter.can_be_displaced
    adapter.running["s"] = (0.0, "")
    assert not adapter.can_be_displaced


def test_the_best_priority_of_held_requests_counts() -> None:
    adapter = loaded()
    for name, priority in (("a", 2), ("b", -1), ("c", 1)):
        adapter.hold(name, Held(name, 0.0, FoundIn.HOST, priority))
    assert adapter.order == (-1, 0.0)
    adapter.unhold("b")
    assert adapter.order == (1, 0.0)
    adapter.unhold(["c", "a"])
    assert not adapter.held
    assert not adapter.priorities


def test_only_parts_of_what_runs_join_an_adapter_that_leaves() -> None:
    adapter = loaded(running={"r": (0.0, "beams"), "s": (0.0, "")}, expected={"others": 9.0})
    for client in ("beams", "others", "third", ""):
        adapter.hold(f"of {client}", Held(None, 0.0, FoundIn.SLOT, client=client))
    assert len(adapter.joining(5.0)) == 4
    adapter.leaving_since = 4.0
    assert [name for name, _ in adapter.joining(5.0)] == ["of beams", "of others"]
    assert adapter.joining(65.0) == []
