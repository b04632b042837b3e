"""Where adapters are: what requests suggest, and what reports correct of it."""

from __future__ import annotations

from lora_plugins.routing.residency import GRACE_S, Report, Residency, Tier


def sent(residency, adapter, now_s=0.0):
    """A request for it, from its beginning to its end."""
    residency.routed(adapter, "a", now_s)
    residency.completed(adapter, "a")


def of(capacity):
    residency = Residency()
    residency.join("a")
    residency.reported("a", Report({}, capacity), 0.0)
    return residency


def test_reports_correct_what_requests_suggested():
    residency = of(10)
    sent(residency, "sql")
    residency.reported("a", Report({}, 10), 1.0)  # may be older than the request
    assert residency.of("sql") == {"a": Tier.HOST}
    residency.reported("a", Report({}, 10), 1.0 + GRACE_S)
    assert residency.of("sql") == {}


def test_without_reports_least_recently_used_adapter_is_taken_for_evicted():
    residency = of(2)
    for adapter in ("a", "b", "a", "c"):
        sent(residency, adapter)
    assert [bool(residency.of(adapter)) for adapter in ("a", "b", "c")] == [True, False, True]


def test_an_adapter_loads_until_its_first_request_has_ended():
    residency = of(2)
    residency.routed("sql", "a", 0.0)
    assert residency.of("sql") == {"a": Tier.LOADING}
    residency.completed("sql", "a")
    assert residency.of("sql") == {"a": Tier.HOST}


def test_files_are_where_reports_say_until_the_replica_leaves():
    residency = of(2)
    residency.reported("a", Report({"sql": Tier.STORE}), 0.0)
    assert residency.stored("sql") == {"a"}
    residency.leave("a")
    assert residency.stored("sql") == set()
