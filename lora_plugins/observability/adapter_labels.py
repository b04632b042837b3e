"""Bounds on the series of metrics: labels with adapters' names, and a gauge of the latest settings."""

from __future__ import annotations

from prometheus_client import Gauge

OTHERS = "_other"

_MAX_LENGTH = 256


class AdapterLabels:
    """Gives the first `max_adapters` served adapters a label each, and all other adapters a common label.

    Only for served adapters: a client can put any name into a request.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the label of a served adapter."""
        label = self._labels.get(name)
        if label is None:
            # First come, first served: exchanging labels would begin and end series all the time.
            if len(self._labels) >= self._max_adapters:
                return OTHERS
            label = self._labels[name] = label_of(name)
        return label

    def forget(self, name: str) -> str | None:
        """Free an adapter's label for the next adapter; return the label, or None without a label."""
        return self._labels.pop(name, None)


def label_of(name: str) -> str:
    """Return a name as text that UTF-8 can carry: a name that was loaded by hand may be anything."""
    return name[:_MAX_LENGTH].encode(errors="backslashreplace").decode()


def keep_latest(gauge: Gauge, most: int) -> None:
    """Remove all series of the gauge except the `most` latest series; a value is the time of its setting."""
    samples = [sample for metric in gauge.collect() for sample in metric.samples]
    samples.sort(key=lambda sample: sample.value, reverse=True)
    for sample in samples[most:]:
        gauge.remove(*sample.labels.values())
