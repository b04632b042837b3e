"""Pushes: an adapter in the body of an HTTP request becomes the next version of a name, as trainers send them.

Runs in the leading API server, for the route `PUT /v1/loras/{name}` (`api/routes.py`). The bytes arrive by the
rules of `arrivals.py`, `api/push_body.py` writes them to a directory of the store, and `Lifecycle.take` verifies, loads
and swaps. Bodies of one name may arrive at the same time, but one push after the other changes the name. A push is
refused once a later push of the name has arrived: nobody wants a trainer's earlier step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Unpack
from weakref import WeakValueDictionary

from lora_plugins.errors import NoFreeSlot, OutOfMemory, PushSuperseded
from lora_plugins.lifecycle.arrivals import Arrivals, Body, BodyRoom
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.swapping import SwapOptions, VersionChange
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.store.disk_errors import store_errors

_MINUTE_S = 60.0
_MOST_NAMES = 10_000  # pushed by one sender, because a push takes time in proportion to all names served
# Writes the pieces of a body to a directory; returns the SHA-256 of the whole body, and files that were left out.
Receive = Callable[[AsyncIterator[bytes], Path], Awaitable[tuple[str, frozenset[str]]]]


@dataclass(frozen=True, slots=True)
class ServedPush:
    """A push whose version is served.

    Attributes:
        waited_s: seconds of waiting for a place to be received, and later for an earlier push of this name.
        received_s: seconds from the place until all bytes were in the store.
        served_s: seconds for verifying, loading and swapping in the version, after both waits.
        left_out: names of files in the body that were not taken.
    """

    change: VersionChange
    waited_s: float
    received_s: float
    served_s: float
    left_out: frozenset[str] = frozenset()


@dataclass(eq=False)
class _PushesOfName:
    """The pushes of one name, which are numbered as they come.

    Attributes:
        last, served: numbers of the last push that came, and of the last push whose version was served; 0 for none.
        waiting: numbers of pushes whose bytes have arrived, and which wait to change the name.
        is_changing: a push changes the name now, and is no longer in `waiting`.
        changed: notified at each change of the other attributes that a waiting push looks at.
    """

    last: int = 0
    served: int = 0
    waiting: set[int] = field(default_factory=set)
    is_changing: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def newest(self) -> int:
        """The highest number of a push that is served, or whose bytes have arrived: lower numbers are superseded."""
        return max(self.served, *self.waiting, 0)


class Pushes:
    """Receives adapters for one server; for one event loop."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        resolver = lifecycle.server.resolver
        settings = resolver.settings
        self._arrivals = Arrivals(
            resolver.store, settings.fetch_timeout_s, settings.max_adapter_bytes, settings.fetch_max_s
        )
        self._names = WeakValueDictionary[str, _PushesOfName]()  # an entry lives as long as a push of the name
        # Names, and their new versions' bytes, that are changing now; they count already, so that no two changes at a
        # time take the same room.
        self._coming: list[tuple[str, int]] = []
        self._times: dict[str, deque[float]] = {}  # of each principal's pushes within the last minute

    def count(self, label: str, per_minute: int) -> None:
        """Count a push of a principal, before a byte of the push is read.

        Args:
            label: the principal's.
            per_minute: the pushes that the policy allows the principal within a minute.

        Raises:
            NoFreeSlot: the principal has pushed as often as it may within a minute.
        """
        now, times = time.monotonic(), self._times.setdefault(label, deque())
        # `times` has the oldest push first: drop the pushes of more than a minute ago.
        while times and times[0] <= now - _MINUTE_S:
            times.popleft()
        if len(times) >= per_minute:
            refusal = NoFreeSlot(
                f"{len(times)} pushes of {label} within a minute",
                expected=f"{per_minute} at most",
                remedy="push again later, or have the operator set pushes_per_minute in the policy",
            )
            refusal.retry_after_s = math.ceil(times[0] + _MINUTE_S - now)
            raise refusal
        times.append(now)

    def left_bytes(self, name: str, sender: Share, owns: Callable[[str], bool], size_bytes: int) -> int | None:
        """Bytes that a version of `name` with `size_bytes` leaves of the sender's share of the store's budget.

        Returns None where the share has no limit. `owns` says whether the sender owns a name: the sender's other names
        stay at their pushed versions, which no eviction removes, so these versions count too.

        Raises:
            OutOfMemory: the version and the versions of other names exceed the share, or the names are too many.
        """
        most_bytes = self._arrivals.most_bytes(sender)
        if most_bytes is None:
            return None
        kept_names, kept_bytes = self._staying(lambda other: other != name and owns(other))
        if size_bytes + kept_bytes > most_bytes or kept_names >= _MOST_NAMES:
            raise OutOfMemory(
                f"{size_bytes} bytes or more, beside {kept_bytes} of {kept_names} other names that were pushed",
                expected=f"at most {most_bytes}, the key's share of the store's budget, of {_MOST_NAMES} names",
                remedy="unload names that are no longer needed (DELETE /v1/loras/NAME), push a smaller adapter, or "
                "have LORA_PLUGINS_STORE_MAX_BYTES or the share in the policy raised",
                adapter=name,
            )
        return most_bytes - kept_bytes - size_bytes

    @contextmanager
    def admitted(self, name: str, sender: Share, owns: Callable[[str], bool], size_bytes: int) -> Iterator[None]:
        """Inside, `name` changes to a version with `size_bytes`, which counts against the sender's share already.

        Raises:
            OutOfMemory: as `left_bytes`.
        """
        self.left_bytes(name, sender, owns, size_bytes)
        self._coming.append(one := (name, size_bytes))
        try:
            yield
        finally:
            self._coming.remove(one)

    def _staying(self, of: Callable[[str], bool]) -> tuple[int, int]:
        """The number of names that stay at a fixed digest, as after a push, and the bytes of their versions.

        `of` says which names count. Names that are changing to a fixed digest count too.
        """
        kept = [
            (adapter.name, version)
            for adapter in self._lifecycle.registry.all()
            if (version := adapter.version) is not None and version.digest == adapter.held_digest
            if not adapter.is_by_digest and of(adapter.name)
        ]
        coming = [(name, size_bytes) for name, size_bytes in self._coming if of(name)]
        names = {name for name, _ in (*kept, *coming)}
        # Names with one digest share a copy in the store.
        stored_bytes = sum({version.digest: version.size_bytes for _, version in kept}.values())
        return len(names), stored_bytes + sum(size_bytes for _, size_bytes in coming)

    async def push(
        self,
        name: str,
        body: Body,
        receive: Receive,
        *,
        expects: str | None = None,
        **options: Unpack[SwapOptions],
    ) -> ServedPush:
        """Serve the files that `receive` writes as the next version of `name`.

        Args:
            name: without a revision.
            body: of the request.
            receive: writes the files.
            expects: the digest that must be served now, or `ANY_VERSION`; checked before and after receiving the bytes.
            options: see `SwapOptions`.

        Raises:
            SlowBody: the body came too slowly. NoFreeSlot, OutOfMemory: no place for the body, no room in the store, or
                nothing left of the sender's share.
            PushSuperseded: a later push of this name has arrived before.
            VersionMismatch: another version is served than expected.
            LoRAPluginsError: the version cannot be served. Nothing has changed then, and no file is left.
        """
        began = time.perf_counter()
        self._lifecycle.check_pushed(name, expects)
        of_name = self._names.setdefault(name, _PushesOfName())
        number = of_name.last = of_name.last + 1
        async with self._arrivals.place(body):
            placed = time.perf_counter()
            # Another push may have changed the served version during the wait.
            self._lifecycle.check_pushed(name, expects)
            left_bytes = partial(self.left_bytes, name, body.sender, body.owns)
            room = BodyRoom(self._lifecycle.server.resolver.store, left_bytes)
            async with self._directory() as directory, room:
                with store_errors():
                    body_sha256, left_out = await receive(self._arrivals.pieces(body, room), directory)
                    pushed = await asyncio.to_thread(PushedAdapter.of, name, directory, body_sha256)
                received = time.perf_counter()
                async with self._changing(name, of_name, number):
                    began_change = time.perf_counter()
                    size_bytes = sum(file.size_bytes for file in pushed.files)
                    # Check the share once more: other pushes may have changed names since the bytes came.
                    with self.admitted(name, body.sender, body.owns, size_bytes):
                        # End the reserved room: from here on the store counts the bytes as a version's.
                        await room.aclose()
                        change = await self._lifecycle.take(name, pushed, expects=expects, **options)
        served = time.perf_counter()
        waited_s = placed - began + began_change - received
        return ServedPush(change, waited_s, received - placed, served - began_change, left_out)

    @asynccontextmanager
    async def _changing(self, name: str, of_name: _PushesOfName, number: int) -> AsyncIterator[None]:
        """Inside, this push alone changes the name; raises PushSuperseded once a later push has arrived."""
        of_name.waiting.add(number)
        try:
            async with of_name.changed:
                of_name.changed.notify_all()  # earlier pushes that wait are superseded now, and must see so
                await of_name.changed.wait_for(lambda: not of_name.is_changing or number < of_name.newest)
                if number < of_name.newest:
                    raise PushSuperseded(
                        "a later push of this name",
                        adapter=name,
                        remedy="nothing, if the later push is yours; otherwise see what is served, push with If-Match",
                    )
                of_name.is_changing = True
        finally:
            of_name.waiting.discard(number)
        try:
            yield
            of_name.served = number  # not reached where the change has failed: an earlier push may still be served
        finally:
            of_name.is_changing = False
            async with of_name.changed:
                of_name.changed.notify_all()

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """A directory of the store for the files received, removed at the end."""
        store = self._lifecycle.server.resolver.store
        directory = store.layout.new_temporary(store.processes.me())
        async with AsyncExitStack() as made:
            with store_errors():
                # Reserve no bytes here: `BodyRoom` reserves as the bytes arrive.
                await made.enter_async_context(store.reserve(0, directory))
            yield directory
