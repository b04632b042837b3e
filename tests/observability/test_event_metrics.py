"""The metrics hook: each event is counted exactly, with a bounded number of labels."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from lora_plugins import events
from lora_plugins.errors import InvalidAdapter, NoFreeSlot, RateExceeded, SourceUnavailable
from lora_plugins.observability.adapter_labels import OTHERS, Labelled, keep_latest
from lora_plugins.observability.event_metrics import CountEvents


class Counted:
    def __init__(self, labelled: Labelled = 3, *, can_forget: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.hook = CountEvents(self.registry, labelled, can_forget=can_forget)

    def count(self, *counted) -> Counted:
        for event in counted:
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


def resolved(name="sql", *, fetched=False) -> events.AdapterResolved:
    return events.AdapterResolved(name, "s3", "/store/x", 8, 100, 0.25, 2.0, 0.001, fetched)


def test_all_counters_start_at_zero():
    assert Counted().all == {}


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        (resolved(), {"resolves_total,s3,served": 1, "locate_seconds_count,s3": 1, "locate_seconds_sum,s3": 0.25,
                      "store_hits_total": 1}),
        (resolved(fetched=True), {"resolves_total,s3,served": 1, "locate_seconds_count,s3": 1,
                                  "locate_seconds_sum,s3": 0.25, "store_misses_total": 1}),
        (events.AdapterConfirmed("sql", "hub"), {"resolves_total,hub,served": 1}),
        (events.FetchStarted("sql", "s3", "/store/x", (("a", 1),)), {"fetches,s3": 1}),
        (events.FetchGoesOn("sql", "s3", 5.0, 1, 2), {}),  # logged
        (events.FetchEnded("sql", "s3"), {"fetches,s3": -1}),
        (events.AdapterFetched("sql", "s3", "s3://b/sql", 500, 2.0),
         {"fetch_seconds_count,s3": 1, "fetch_seconds_sum,s3": 2.0, "fetched_bytes_total,s3": 500}),
        (events.AdapterRejected("sql", "s3", InvalidAdapter("x")),
         {"resolves_total,s3,refused": 1, "errors_total,resolve,L005": 1}),
        (events.SourceFailed("sql", "s3", SourceUnavailable("x")),
         {"resolves_total,s3,failed": 1, "errors_total,resolve,L006": 1}),
        (events.BreakerOpened("s3", SourceUnavailable("x")), {"breakers_open,s3": 1}),
        (events.BreakerClosed("s3", 3.0), {"breakers_open,s3": -1}),
        (events.AdapterDenied("sql", "hub", SourceUnavailable("x")),
         {"resolves_total,hub,denied": 1, "errors_total,resolve,L006": 1}),
        (events.LookUpRefused("sql", "s3", SourceUnavailable("x")),
         {"resolves_total,s3,busy": 1, "errors_total,resolve,L006": 1}),
        (events.AdapterUnknown("sql"), {"resolves_total,none,absent": 1}),
        (events.AbsenceRemembered("sql", "s3"), {"absences_remembered_total,s3": 1}),
        (events.StoreEvicted("d", 7), {"store_evictions_total": 1, "store_evicted_bytes_total": 7}),
        (events.StoreDamaged("d"), {"store_damaged_total": 1}),
        (events.RequestServed("sql"), {"requests_total,sql": 1}),
        (events.RequestEnded("sql", 5, 7, 0.25),
         {"prompt_tokens_total,sql": 5, "generation_tokens_total,sql": 7, "time_to_first_token_seconds_count,sql": 1,
          "time_to_first_token_seconds_sum,sql": 0.25}),
        (events.RequestEnded("sql", 0, 7), {"generation_tokens_total,sql": 7}),  # a further choice
        (events.NotServed("request", "sql", NoFreeSlot("x")), {"errors_total,request,L001": 1}),
        (events.NotServed("load", "sql", NoFreeSlot("x")), {"errors_total,load,L001": 1}),
        (events.KeyRefused("team-a", RateExceeded("x")), {"errors_total,key,L013": 1}),
        (events.AdapterLoaded("sql", "/x", 10, 0.5), {}),  # the engines count it
        (events.AdapterSwapped("sql", "a", "b", 2.0),
         {"swaps_total": 1, "swap_load_seconds_count": 1, "swap_load_seconds_sum": 2.0}),
        (events.NotServed("update", "sql", InvalidAdapter("x")), {"errors_total,update,L005": 1}),
        (events.AdapterUnloaded("sql", 3.0, 2),
         {"unloads_total": 1, "drain_seconds_count": 1, "drain_seconds_sum": 3.0, "drain_aborted_requests_total": 2}),
        (events.NotServed("declared", "sql", NoFreeSlot("x")), {"errors_total,declared,L001": 1}),
        (events.DeclaredFileInvalid(NoFreeSlot("x")), {"declared_file_errors_total": 1}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_event_is_counted_once_and_nowhere_else(event, counted):
    once = Counted().count(event).all
    assert once == counted
    assert Counted().count(event, event).all == {key: 2 * value for key, value in counted.items()}


def test_what_the_server_asks_by_itself_is_no_request():
    counted = Counted()
    with events.polling():
        counted.count(events.AdapterConfirmed("sql", "s3"), events.SourceFailed("sql", "s3", SourceUnavailable("x")))
    counted.count(events.AdapterConfirmed("sql", "s3"))
    assert counted.all == {
        "polls_total,s3,served": 1, "polls_total,s3,failed": 1, "errors_total,resolve,L006": 1,
        "resolves_total,s3,served": 1,
    }  # fmt: skip


def test_declared_adapters_are_shown_as_they_are_now():
    counted = Counted().count(
        events.DeclaredSetReconciled(9, 0, 9), events.DeclaredSetReconciled(declared=6, served=3, failed=1)
    )
    assert counted.all == {"declared_adapters,served": 3, "declared_adapters,failed": 1, "declared_adapters,waiting": 2}


def served(name: str, times: int = 1) -> list[events.RequestServed]:
    return [events.RequestServed(name)] * times


def requests(counted: Counted) -> dict[str, float]:
    return {k.split(",", 1)[1]: v for k, v in counted.all.items() if k.startswith("requests_total")}


def test_name_that_was_never_served_gets_no_label():
    counted = Counted(1)
    for number in range(1000):
        counted.count(events.AdapterUnknown(f"x{number}"), events.NotServed("request", f"y{number}", NoFreeSlot("x")))
    counted.count(*served("a"))
    assert requests(counted) == {"a": 1}
    assert len(list(generate_latest(counted.registry).splitlines())) < 600


def test_unloaded_adapter_leaves_no_series_and_frees_its_label():
    counted = Counted(1).count(*served("a"), *served("b"), events.RequestEnded("a", 2, 3, 0.5))
    counted.count(events.AdapterUnloaded("a", 0.0, 0), events.AdapterUnloaded("b", 0.0, 0), *served("b"))
    assert requests(counted) == {"b": 1, OTHERS: 1}
    assert not [key for key in counted.all if key.endswith(",a")]


def test_adapter_without_a_whole_answer_is_unloaded_beside_older_libraries(monkeypatch):
    """vLLM allows prometheus_client 0.18, which until 0.22 removes only series that there are."""

    def remove(self: Counter, *labels: str) -> None:
        del self._metrics[labels]

    monkeypatch.setattr(MetricWrapperBase, "remove", remove)
    counted = Counted(1).count(*served("a"), events.AdapterUnloaded("a", 0.0, 0), *served("b"))
    assert requests(counted) == {"b": 1}


def test_count_of_every_adapter_outlives_its_unload():
    counted = Counted(math.inf)
    for name in (f"customer{number}" for number in range(300)):
        counted.count(
            *served(name),
            events.RequestEnded(name, 2, 3),
            events.AdapterUnloaded(name, 0.0, 0),
            events.RequestEnded(name, 2, 3),
        )
    assert requests(counted) == {f"customer{number}": 1 for number in range(300)}
    assert {value for key, value in counted.all.items() if key.startswith("prompt_tokens")} == {4}


def test_series_that_cannot_be_removed_are_bounded_too():
    counted = Counted(1, can_forget=False)
    for name in ("a", "b", "c"):
        counted.count(*served(name), events.AdapterUnloaded(name, 0.0, 0))
    assert requests(counted) == {"a": 1, OTHERS: 2}


def test_name_that_utf8_cannot_carry_is_escaped():
    assert b"\\\\ud800" in generate_latest(Counted().count(*served("\ud800")).registry)


def test_a_gauge_of_times_keeps_the_series_set_last():
    gauge = Gauge("seen", "when", ["name"], registry=CollectorRegistry())
    for name, second in (("a", 3), ("b", 1), ("c", 2)):
        gauge.labels(name).set(second)
    keep_latest(gauge, 2)
    (metric,) = gauge.collect()
    assert {sample.labels["name"] for sample in metric.samples} == {"a", "c"}
