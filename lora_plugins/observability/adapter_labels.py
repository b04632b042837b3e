"""Labels with adapters' names, of which there are never more than the settings allow."""

from __future__ import annotations

OTHERS = "_other"

_LONGEST = 256


class AdapterLabels:
    """Gives the first `most` adapters that are served a label of their own, and all others one.

    Only adapters that were served may be asked for: names out of requests are anybody's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of an adapter that is served."""
        label = self._labels.get(name)
        if label is None:
            if len(self._labels) >= self._most:
                return OTHERS
            label = self._labels[name] = label_of(name)
        return label

    def forget(self, name: str) -> str | None:
        """Give an adapter's label to the next one; returns it, or None where it had none of its own."""
        return self._labels.pop(name, None)


def label_of(name: str) -> str:
    """A name as text that UTF-8 can carry: one that was loaded by hand may be anything."""
    return name[:_LONGEST].encode(errors="backslashreplace").decode()
