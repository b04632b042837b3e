"""Find published adapters by the beginning of a digest, without listing the root at each request."""

from __future__ import annotations

import os
import time
from bisect import bisect_left

from lora_plugins.store.layout import Layout, is_digest, is_prefix

_SETTLED_NS = 2_000_000_000  # clock ticks of file systems reach 2 s (FAT): two changes may have one time
_AFTER_ALL_DIGITS = "g"


class Published:
    """The digests in a store's root, listed again once the root has changed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._listed: tuple[int, list[str]] = (-1, [])  # the root's time of change in ns, and its digests at the time

    def matching(self, prefix: str) -> list[str]:
        """The published adapters whose digests begin with `prefix`; none where `is_prefix` is false.

        Raises:
            OSError: the root cannot be read.
        """
        if not is_prefix(prefix):
            return []
        changed_ns = os.stat(self._layout.root).st_mtime_ns  # raises where the store is away
        if is_digest(prefix):
            return [prefix] if self._layout.adapter(prefix).is_dir() else []
        listed_ns, digests = self._listed
        if changed_ns != listed_ns:
            if time.time_ns() - changed_ns <= _SETTLED_NS:
                return self._layout.digests(prefix)  # half the time of a full listing, which could not be kept yet
            digests = self._layout.digests()
            self._listed = changed_ns, digests
        return digests[bisect_left(digests, prefix) : bisect_left(digests, prefix + _AFTER_ALL_DIGITS)]
