"""Bounds a gauge with a series for each value of a label, where the value is the time of the last setting."""

from __future__ import annotations

from prometheus_client import Gauge


def keep_latest(gauge: Gauge, most: int) -> None:
    """Remove all series of the gauge except the `most` latest series."""
    samples = [sample for metric in gauge.collect() for sample in metric.samples]
    samples.sort(key=lambda sample: sample.value, reverse=True)
    for sample in samples[most:]:
        gauge.remove(*sample.labels.values())
