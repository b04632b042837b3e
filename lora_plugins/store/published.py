"""Which published adapters a digest's beginning stands for, without a look at all of them for each request."""

from __future__ import annotations

import os
import time
from bisect import bisect_left

from lora_plugins.store.layout import Layout, is_digest, is_prefix

_SETTLED_NS = 2_000_000_000  # two changes may have one time: file systems' clocks have ticks, of up to 2 s on FAT
_AFTER_ALL_DIGITS = "g"


class Published:
    """The digests in a store's root, listed again once the root has changed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._listed: tuple[int, list[str]] = (-1, [])  # the root's time of change, and what it had then

    def matching(self, prefix: str) -> list[str]:
        """The published adapters whose digests begin so; none where `is_prefix` is false.

        Raises:
            OSError: the root cannot be read.
        """
        if not is_prefix(prefix):
            return []
        changed_ns = os.stat(self._layout.root).st_mtime_ns  # of a store that is away nothing is known
        if is_digest(prefix):
            return [prefix] if self._layout.adapter(prefix).is_dir() else []
        listed_ns, digests = self._listed
        if changed_ns != listed_ns:
            if time.time_ns() - changed_ns <= _SETTLED_NS:
                return self._layout.digests(prefix)  # less than half the time of all, which would not be kept
            digests = self._layout.digests()
            self._listed = changed_ns, digests
        return digests[bisect_left(digests, prefix) : bisect_left(digests, prefix + _AFTER_ALL_DIGITS)]
