"""A gauge with the time as its value keeps the latest series only."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from lora_plugins.observability.latest_series import keep_latest


def test_the_series_set_last_are_kept() -> None:
    gauge = Gauge("seen", "when", ["name"], registry=CollectorRegistry())
    for name, second in (("a", 3), ("b", 1), ("c", 2)):
        gauge.labels(name).set(second)
    keep_latest(gauge, 2)
    (metric,) = gauge.collect()
    assert {sample.labels["name"] for sample in metric.samples} == {"a", "c"}
