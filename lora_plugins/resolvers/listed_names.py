"""The names that a server's sources list, for `/v1/models` and for "did you mean": bounded, and with short waits.

Runs on the event loop of an API server. A request waits at most two seconds for sources that are asked again; a source
that fails or is slow keeps the names of its last list, and hides no names of other sources.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from cachetools import TTLCache

from lora_plugins.events import AdapterConfirmed, AdapterRejected, AdapterResolved, AdapterUnknown, Event
from lora_plugins.log import logger
from lora_plugins.resolvers.sources.source import Listing, ListsNames, Source

MOST = 1_000  # names in one answer: about half a megabyte
_KEPT = 100_000  # names of one source; each caller sees only the names that the caller may use
_WAIT_S = 2.0  # for sources that have not answered; the answer then lacks their new names
_LIST_S = 60.0  # for one list, for example of a large bucket
_REFUSED_S = 600.0  # a mended adapter that nobody asks for is listed again after that time
_REFUSED = 10_000  # names


class RefusedNames:
    """A hook on events: names whose adapter was found and refused at the last look-up, for ten minutes."""

    def __init__(self) -> None:
        self._names: TTLCache[str, None] = TTLCache(_REFUSED, _REFUSED_S)

    def __call__(self, event: Event) -> None:
        """Note what a look-up has found."""
        match event:
            case AdapterRejected():
                self._names[event.name] = None
            case AdapterResolved() | AdapterConfirmed() | AdapterUnknown():
                self._names.pop(event.name, None)

    def names(self) -> frozenset[str]:
        return frozenset(self._names)


class ListedNames:
    """The last list of each source; a call asks the source again after `fresh_s` seconds."""

    def __init__(self, sources: Sequence[Source], fresh_s: float) -> None:
        self._sources = sources
        self._fresh_s = fresh_s
        # By labels of sources:
        self._names: dict[str, tuple[str, ...]] = {}  # the last list
        self._asked: dict[str, tuple[float, asyncio.Task[None]]] = {}  # the last question, and when it was asked
        self._failed: set[str] = set()  # the last question failed, and the log says so
        self._has_warned_of_cut = False

    def at_hand(self) -> Iterator[str]:
        """Names of the sources' last lists; no source is asked."""
        return itertools.chain.from_iterable(self._names.values())

    async def names(self, base_path: str, may_list: Callable[[str], bool]) -> list[str]:
        """The first `MOST` names that `may_list` accepts, in alphabetical order.

        `base_path` is the served model's path or Hub id, which templates of object stores may contain.
        """
        for source in self._sources:
            if isinstance(source, ListsNames):
                self._ask(source.label, source, base_path)
        if asking := [task for _, task in self._asked.values() if not task.done()]:
            await asyncio.wait(asking, timeout=_WAIT_S)
        return await asyncio.to_thread(self._first, may_list)

    def _first(self, may_list: Callable[[str], bool]) -> list[str]:
        names = heapq.nsmallest(MOST + 1, filter(may_list, set(self.at_hand())))
        if len(names) > MOST and not self._has_warned_of_cut:
            self._has_warned_of_cut = True
            text = (
                "/v1/models lists the first %s names of the sources; the others answer too ('lora-plugins ls --remote')"
            )
            logger.warning(text, f"{MOST:,}")
        return names[:MOST]

    def _ask(self, label: str, source: ListsNames, base_path: str) -> None:
        now, asked = time.monotonic(), self._asked.get(label)
        # A failed question counts too, so that a broken source is not asked at every request.
        if asked is None or (asked[1].done() and now - asked[0] >= self._fresh_s):
            self._asked[label] = now, asyncio.get_running_loop().create_task(self._list(label, source, base_path))

    async def _list(self, label: str, source: ListsNames, base_path: str) -> None:
        try:
            listing: Listing = await asyncio.wait_for(source.names(base_path), _LIST_S)
        except Exception as error:  # noqa: BLE001 - a list is optional, and others' sources may raise anything
            if label not in self._failed:
                logger.warning("/v1/models lists what %s had before, as it does not list its names: %r", label, error)
            self._failed.add(label)
            return
        self._failed.discard(label)
        if len(listing.names) > _KEPT:
            logger.warning("/v1/models lists %d of the %d names of %s", _KEPT, len(listing.names), label)
        self._names[label] = tuple(listing.names[:_KEPT])
