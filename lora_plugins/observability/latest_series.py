"""Bounding a gauge that has a series for each thing it was ever set to, with the time of that as its value."""

from __future__ import annotations

from prometheus_client import Gauge


def keep_latest(gauge: Gauge, most: int) -> None:
    """Remove all series of the gauge but the `most` that were set last."""
    samples = [sample for metric in gauge.collect() for sample in metric.samples]
    samples.sort(key=lambda sample: sample.value, reverse=True)
    for sample in samples[most:]:
        gauge.remove(*sample.labels.values())
