"""Bounds on the series of metrics: labels with adapters' names, and a gauge of the latest settings.

Used in the API server by `event_metrics.py` at each event and by `engine_metrics.py` at each scrape. In: the name of a
served adapter, and the setting `LORA_PLUGINS_METRICS_ADAPTERS`. Out: the adapter's own label, or the common `_other`.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from prometheus_client import Gauge

from lora_plugins.adapter.mixture import terms_of
from lora_plugins.log import logger

Labelled = float | Path

OTHERS = "_other"

_MAX_LENGTH = 256
_LOOK_S = 1.0


class AdapterLabels:
    """Gives served adapters a label each, and all that are not `labelled` a common label.

    Only for served adapters: a client can put any name into a request. A label ends only where a number bounds labels:
    what was counted since the last scrape ends too.

    Args:
        labelled: how many adapters have a label, first come, first served; or a file with a name on each line.
    """

    def __init__(self, labelled: Labelled) -> None:
        self._most = math.inf if isinstance(labelled, Path) else labelled
        self._file = _NamesFile(labelled) if isinstance(labelled, Path) else None
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the label of a served adapter."""
        if self._file is not None:
            return self._file.label_of(name)
        label = self._labels.get(name)
        if label is None:
            # First come, first served: exchanging labels would begin and end series all the time.
            if len(self._labels) >= self._most:
                return OTHERS
            label = self._labels[name] = label_of(name)
        return label

    def at(self, place: int, name: str) -> str:
        """Return the label of the name at `place`, from 0, in a list of the moment; no label is kept for the name."""
        if self._file is not None:
            return self._file.label_of(name)
        return label_of(name) if place < self._most else OTHERS

    def forget(self, name: str) -> str | None:
        """Free an adapter's label for the next adapter; return the label, or None without a label to free."""
        return None if self._most == math.inf else self._labels.pop(name, None)


class _NamesFile:
    """Names, one on each line, `#` before a comment; read again after a change, once a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at_s = -math.inf
        self._version: tuple[int, ...] = ()
        self._names: frozenset[str] = frozenset()
        self._fails = False

    def label_of(self, name: str) -> str:
        """Return the label of a listed name; a version of a listed name is counted with the name, a mixture is not."""
        if time.monotonic() - self._looked_at_s >= _LOOK_S:
            self._looked_at_s = time.monotonic()
            self._read()
        path = name if terms_of(name) is not None else name.partition("@")[0]
        return next((label_of(one) for one in (name, path) if one in self._names), OTHERS)

    def _read(self) -> None:
        try:
            status = self._path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version != self._version:
                names = (line.strip() for line in self._path.read_text(encoding="utf-8").splitlines())
                self._names = frozenset(name for name in names if name and not name.startswith("#"))
                self._version = version
            self._fails = False
        except (OSError, ValueError) as error:  # the names of before go on, as their series do
            if not self._fails:
                logger.warning("%s: %s; the names read before keep their labels", self._path, error)
            self._fails = True


def label_of(name: str) -> str:
    """Return a name as text that UTF-8 can carry: a name that was loaded by hand may be anything."""
    return name[:_MAX_LENGTH].encode(errors="backslashreplace").decode()


def keep_latest(gauge: Gauge, most: int) -> None:
    """Remove all series of the gauge except the `most` latest series; a value is the time of its setting."""
    samples = [sample for metric in gauge.collect() for sample in metric.samples]
    samples.sort(key=lambda sample: sample.value, reverse=True)
    for sample in samples[most:]:
        gauge.remove(*sample.labels.values())
