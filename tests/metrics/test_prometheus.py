"""The hook: each event is counted where it belongs, exactly, and under a bounded number of labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lora_plugins.errors import InvalidAdapter, NoFreeSlot, SourceUnavailable
from lora_plugins.events import (
    AbsenceRemembered,
    AdapterConfirmed,
    AdapterFetched,
    AdapterReady,
    AdapterRejected,
    AdapterResolved,
    AdapterSwapped,
    AdapterUnknown,
    AdapterUnloaded,
    Found,
    GatePassed,
    GateRefused,
    SourceFailed,
    StoreEvicted,
    UpdateFailed,
)
from lora_plugins.metrics.labels import OTHERS
from lora_plugins.metrics.prometheus import CountEvents


class Counted:
    def __init__(self, most_adapters: int = 3, *, can_forget: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.hook = CountEvents(self.registry, most_adapters, can_forget=can_forget)

    def tell(self, *events) -> Counted:
        for event in events:
            self.hook(event)
        return self

    @property
    def all(self) -> dict[str, float]:
        """Every sample that is not 0, but for buckets and times of creation."""
        return {
            sample.name.removeprefix("lora_plugins_") + "".join(f",{v}" for v in sample.labels.values()): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.value and not sample.name.endswith(("_bucket", "_created"))
        }


def resolved(name="sql", *, fetched=False) -> AdapterResolved:
    return AdapterResolved(name, "s3", "/store/x", 8, 100, 0.25, 2.0, 0.001, fetched)


def test_before_anything_has_happened_all_is_zero():
    assert Counted().all == {}


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        (resolved(), {"resolves_total,s3,served": 1, "locate_seconds_count,s3": 1, "locate_seconds_sum,s3": 0.25,
                      "store_hits_total": 1}),
        (resolved(fetched=True), {"resolves_total,s3,served": 1, "locate_seconds_count,s3": 1,
                                  "locate_seconds_sum,s3": 0.25, "store_misses_total": 1}),
        (AdapterConfirmed("sql", "hub"), {"resolves_total,hub,served": 1}),
        (AdapterFetched("sql", "s3", "s3://b/sql", 500, 2.0),
         {"fetch_seconds_count,s3": 1, "fetch_seconds_sum,s3": 2.0, "fetched_bytes_total,s3": 500}),
        (AdapterRejected("sql", "s3", InvalidAdapter("x")),
         {"resolves_total,s3,refused": 1, "errors_total,resolve,L005": 1}),
        (SourceFailed("sql", "s3", SourceUnavailable("x")),
         {"resolves_total,s3,failed": 1, "errors_total,resolve,L006": 1}),
        (AdapterUnknown("sql"), {"resolves_total,none,absent": 1}),
        (AbsenceRemembered("sql", "s3"), {"absences_remembered_total,s3": 1}),
        (StoreEvicted("d", 7), {"store_evictions_total": 1, "store_evicted_bytes_total": 7}),
        (GatePassed("sql", Found.SLOT, 0.5, load=False),
         {"gate_wait_seconds_count,request,slot": 1, "gate_wait_seconds_sum,request,slot": 0.5,
          "requests_total,sql": 1, "slot_hits_total": 1}),
        (GatePassed("sql", Found.HOST, 0.5, load=False),
         {"gate_wait_seconds_count,request,host": 1, "gate_wait_seconds_sum,request,host": 0.5,
          "requests_total,sql": 1, "slot_misses_total": 1, "host_hits_total": 1}),
        (GatePassed("sql", Found.STORE, 0.5, load=True),
         {"gate_wait_seconds_count,load,store": 1, "gate_wait_seconds_sum,load,store": 0.5,
          "slot_misses_total": 1, "host_misses_total": 1}),
        (GateRefused("sql", NoFreeSlot("x"), 0.5, load=False), {"errors_total,gate,L001": 1}),
        (AdapterReady("sql", "/x", 10, 0.5, 0.25),
         {"stage_seconds_count": 1, "stage_seconds_sum": 0.5, "place_seconds_count": 1, "place_seconds_sum": 0.25}),
        (AdapterSwapped("sql", "a", "b", 2.0),
         {"swaps_total": 1, "swap_stage_seconds_count": 1, "swap_stage_seconds_sum": 2.0}),
        (UpdateFailed("sql", InvalidAdapter("x")), {"errors_total,update,L005": 1}),
        (AdapterUnloaded("sql", 3.0, 2),
         {"unloads_total": 1, "drain_seconds_count": 1, "drain_seconds_sum": 3.0, "drain_aborted_requests_total": 2}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_event_is_counted_once_and_nowhere_else(event, counted):
    once = Counted().tell(event).all
    assert once == counted
    assert Counted().tell(event, event).all == {key: 2 * value for key, value in counted.items()}


def passed(name: str, times: int = 1) -> list[GatePassed]:
    return [GatePassed(name, Found.SLOT, 0.0, load=False)] * times


def requests(counted: Counted) -> dict[str, float]:
    return {k.split(",", 1)[1]: v for k, v in counted.all.items() if k.startswith("requests_total")}


def test_adapters_beyond_the_bound_share_a_label():
    counted = Counted(2).tell(*passed("a", 2), *passed("b"), *passed("c", 3), *passed("d"), *passed("a"))
    assert requests(counted) == {"a": 3, "b": 1, OTHERS: 4}


def test_names_that_are_only_asked_for_get_no_label():
    counted = Counted(1)
    for number in range(1000):
        counted.tell(AdapterUnknown(f"x{number}"), GateRefused(f"y{number}", NoFreeSlot("x"), 0.0, load=False))
    counted.tell(*passed("a"))
    assert requests(counted) == {"a": 1}
    assert len(list(generate_latest(counted.registry).splitlines())) < 600


def test_an_adapter_that_is_gone_leaves_no_series_and_gives_its_label_up():
    counted = Counted(1).tell(*passed("a"), *passed("b"))
    counted.tell(AdapterUnloaded("a", 0.0, 0), AdapterUnloaded("b", 0.0, 0), *passed("b"))
    assert requests(counted) == {"b": 1, OTHERS: 1}


def test_where_series_cannot_go_their_number_is_bounded_all_the_same():
    counted = Counted(1, can_forget=False)
    for name in ("a", "b", "c"):
        counted.tell(*passed(name), AdapterUnloaded(name, 0.0, 0))
    assert requests(counted) == {"a": 1, OTHERS: 2}


def test_a_name_that_no_text_can_carry_is_shown_all_the_same():
    assert b"\\\\ud800" in generate_latest(Counted().tell(*passed("\ud800")).registry)
