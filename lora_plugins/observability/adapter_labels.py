"""Metric labels with adapters' names, never more than the settings allow."""

from __future__ import annotations

OTHERS = "_other"

_MAX_LENGTH = 256


class AdapterLabels:
    """Gives the first `max_adapters` adapters that are served their own label each, and all others one.

    Only for adapters that were served: a client can put any name into a request.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of an adapter that is served."""
        label = self._labels.get(name)
        if label is None:
            if len(self._labels) >= self._max_adapters:
                return OTHERS
            label = self._labels[name] = label_of(name)
        return label

    def forget(self, name: str) -> str | None:
        """Free an adapter's label for the next one; returns it, or None where it had none."""
        return self._labels.pop(name, None)


def label_of(name: str) -> str:
    """A name as text that UTF-8 can carry: one that was loaded by hand may be anything."""
    return name[:_MAX_LENGTH].encode(errors="backslashreplace").decode()
