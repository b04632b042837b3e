"""What a worker counts: each thing that happens, once; and who is where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_plugins.manager.counters import BOUNDS_S, Seconds
from tests.manager.small_model import Adapter, ask, bring, step


def counted(manager: Any) -> dict[str, Any]:
    counters = manager.lora_metrics()["counters"]
    assert json.loads(json.dumps(counters))  # an RPC can carry it
    return dict(counters)


def rows(manager: Any) -> dict[str, tuple[bool, bool]]:
    return {name: (in_slot, pinned) for name, in_slot, pinned in counted(manager)["loaded"]}


def test_durations_fall_into_their_buckets() -> None:
    seconds = Seconds()
    for duration_s in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        seconds.observe(duration_s)
    assert seconds.counts == [2, 1, *[0] * (len(BOUNDS_S) - 3), 1, 1]
    assert seconds.plain()["total_s"] == sum((0.0, BOUNDS_S[0] * 2.01, BOUNDS_S[-1] * 2 + 1))


def test_before_anything_has_happened(make_manager: Any) -> None:
    figures = counted(make_manager(slots=2, max_adapters=4))
    assert (figures.pop("slots"), figures.pop("host_max_adapters"), figures.pop("host_max_bytes")) == (2, 4, None)
    assert figures.pop("load_seconds") == figures.pop("activate_seconds") == Seconds().plain()
    assert not any(figures.values())


def test_flips_copies_evictions_and_who_is_where(make_manager: Any, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1, max_adapters=2)
    bring(manager, adapters[0])
    step(manager, adapters[0])  # flipped
    bring(manager, adapters[1], busy=None)
    assert rows(manager) == {adapters[0].name: (True, False), adapters[1].name: (False, False)}
    step(manager, adapters[1])  # copied, into the slot of the first
    assert rows(manager) == {adapters[0].name: (False, False), adapters[1].name: (True, False)}
    manager.pin_adapter(adapters[1].adapter_id)
    assert rows(manager)[adapters[1].name] == (True, True)
    manager.release("server", adapters[0].adapter_id)
    bring(manager, adapters[2], busy=None)  # the first leaves host memory
    figures = counted(manager)
    assert (figures["slot_flips"], figures["slot_copies"], figures["slot_evictions"]) == (1, 1, 1)
    assert (figures["host_evictions"], figures["host_evicted_bytes"]) == (1, adapters[0].size_bytes)
    assert figures["host_bytes"] == 2 * adapters[0].size_bytes
    assert figures["host_leased"] == 2
    assert sum(figures["activate_seconds"]["counts"]) == 2
    assert sum(figures["load_seconds"]["counts"]) == 3
    assert 0 < figures["activate_seconds"]["total_s"] < 10
    assert set(rows(manager)) == {adapters[1].name, adapters[2].name}


def test_what_cannot_be_loaded_is_counted_and_not_timed(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager()
    assert bring(manager, Adapter(9, tmp_path / "none", {}, {})) == "failed"
    figures = counted(manager)
    assert figures["load_failures"] == 1
    assert sum(figures["load_seconds"]["counts"]) == 0
    assert figures["loaded"] == []


def test_where_it_was_is_said_before_it_is_brought(make_manager: Any, adapters: list[Adapter]) -> None:
    manager = make_manager(slots=1, max_adapters=3)

    def found(adapter: Adapter) -> str:
        return str(ask(manager, adapter)["found"])

    assert found(adapters[0]) == "store"
    bring(manager, adapters[0])
    assert found(adapters[0]) == "slot"
    bring(manager, adapters[1])
    assert found(adapters[0]) == "host"


def test_one_that_was_added_without_staging_has_its_name_too(make_manager: Any, adapters: list[Adapter]) -> None:
    manager = make_manager()
    manager.add_adapter(adapters[0].request())
    assert rows(manager) == {adapters[0].name: (True, False)}
    assert sum(counted(manager)["load_seconds"]["counts"]) == 1
