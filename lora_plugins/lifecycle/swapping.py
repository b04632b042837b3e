"""Swap a served name to another version while requests run; also the first load of a name.

Runs in the leading API server, in the event loop. `change` gets a version that `finding.py` has found and leased, has
the engines load the version, and then has vLLM's table of names point to it.

Each version has an engine id (`lora_int_id`) of its own, so engines have the old version and the new one side by side:
running requests finish on the old version, and every later request gets the new one. Engines evict the old version once
its last request has left. No request of the new version matches cached prefixes of the old, because vLLM's cache keys
hold the adapter's path (0.30: see lora_request.py). A load that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypedDict

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import AdapterSwapped, NotServed
from lora_plugins.lifecycle.api_server import ApiServer
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.resolvers.known_versions import ResolvedAdapter

KEPT_VERSIONS = 2


class ChangeReason(Enum):
    """Why a name serves another version than before a call, or the same version.

    Attributes:
        LOADED: the name was not served before.
        SWAPPED: the name was served in another version, or from another path.
        REPAIRED: the store's copy was damaged: the engines have loaded the same version again, from a sound copy.
        UNCHANGED: the version was served already, and the engines have loaded nothing.
    """

    LOADED = auto()
    SWAPPED = auto()
    REPAIRED = auto()
    UNCHANGED = auto()


@dataclass(frozen=True, slots=True)
class VersionChange:
    """Digests of a name before and after a call; None where the name is not served, or only workers have it."""

    before: str | None
    after: str | None
    reason: ChangeReason

    @property
    def is_swap(self) -> bool:
        """Whether the engines have loaded weights in the place of the weights that were served before."""
        return self.reason in (ChangeReason.SWAPPED, ChangeReason.REPAIRED)


class SwapOptions(TypedDict, total=False):
    """What a push may ask of `change`.

    Attributes:
        moves: running requests go on with the new version, from one step on. Else they finish on the old version.
        pins: the version is pinned before any request gets it.
        kept_versions: number of earlier versions that stay in the store, for `name@digest` and a rollback.
    """

    moves: bool
    pins: bool
    kept_versions: int


async def change(
    server: ApiServer,
    adapter: ServedAdapter,
    version: ResolvedAdapter | None,
    uri: str | None,
    held_digest: str | None,
    *,
    path: str = "",
    moves: bool = False,
    pins: bool = False,
    kept_versions: int = KEPT_VERSIONS,
    is_noted: bool = False,
) -> VersionChange:
    """Have new requests for a name enter the engine with `version`; the caller holds the name's lock.

    `adapter` is the served adapter, or a new one for a name that is not served; its `uri` and `held_digest` become
    those given, None included. `version` is leased for the name; None stands for the files that only the workers find
    at `path`, and only then `path` counts. The version served already is loaded again only where its copy was damaged.
    A pinned name stays pinned. `moves`, `pins` and `kept_versions`: as in `SwapOptions`; `is_noted`: as in
    `PlannerClient.load`.

    Raises:
        LoRAPluginsError: the version cannot be loaded; the old version goes on, and the lease has ended.
    """
    # `old` is vLLM's request of the version served so far, None where the name is not served; `before` is its digest.
    started, old, before, old_words = time.perf_counter(), adapter.request, adapter.digest, _in_words(adapter)
    reason = ChangeReason.LOADED if old is None else ChangeReason.SWAPPED
    moves, pins = moves and old is not None, pins or adapter.is_pinned
    leased = [] if version is None else [version]
    if version is not None:
        # The path of a repaired copy gets a new spelling, because engines may have computed cached prefixes, whose keys
        # hold the old spelling, from the damaged bytes.
        path = await server.engine_path(adapter.name, version, other_than=old.lora_path if adapter.is_damaged else "")
        if before == version.digest and old.lora_path == path:
            # The engines have this version. Only place, source or fixed digest may be new, and are written down then.
            has_news = (adapter.version, adapter.uri, adapter.held_digest) != (version, uri, held_digest)
            adapter.now_serves(version, uri, held_digest)
            if has_news:
                server.on_change()
            return VersionChange(before, before, ChangeReason.UNCHANGED)
        reason = ChangeReason.REPAIRED if before == version.digest else reason
    request = server.vllm.new_request(adapter.name, path, adapter.base_name)
    try:
        succeeds = old.lora_int_id if moves else None
        await server.planner.load(request, uri=uri, wants_slot=old is None, succeeds=succeeds, is_noted=is_noted)
        if pins and not (moves and adapter.is_pinned):  # a move passes the old version's pin on to the new version
            await server.planner.pin(request, uri=uri)
    except BaseException:
        server.retire(request.lora_int_id)
        server.release(adapter.name, *leased)
        raise
    # No await until `put`: no request sees half a swap. A version that is served again leaves the earlier versions: a
    # name has one lease for a version, so dropping the earlier version later would end the served version's lease.
    previous = [kept for kept in adapter.versions if version is None or kept.digest != version.digest]
    adapter.request, adapter.previous = request, previous[:kept_versions]
    adapter.is_pinned, adapter.loading = pins, None
    adapter.now_serves(version, uri, held_digest)
    server.registry.put(adapter)
    server.on_change()
    if old is not None:
        # The new version inherits the time of use: eviction must not take a swap for a request.
        used_at = server.planner.used_at.get(old.lora_int_id)
        if used_at is not None:
            server.planner.used_at[adapter.engine_id] = used_at
        server.release(adapter.name, *previous[kept_versions:])
        server.events.emit(AdapterSwapped(adapter.name, old_words, _in_words(adapter), time.perf_counter() - started))
        if moves:
            # Requests that took the old version from the table, but reach an engine only after the move, move too.
            # Shielded, because the table has changed already: the move must follow even if the caller is cancelled.
            await asyncio.shield(background(server.planner.move(request.lora_int_id)))
        else:
            server.retire(old.lora_int_id)
    return VersionChange(before, adapter.digest, reason)


@contextmanager
def updating(server: ApiServer, adapter: ServedAdapter) -> Iterator[None]:
    """Inside, a served adapter gets another version; a failure is noted in the adapter and emitted as an event.

    For an adapter that is not served yet, a failure is only raised. Calls of `change` inside pass `is_noted` for a
    served adapter, so that a failed load is one event, not two.
    """
    try:
        yield
    except LoRAPluginsError as error:
        if adapter.is_served:
            adapter.failed(error)
            server.events.emit(NotServed("update", adapter.name, error))
        raise


def _in_words(adapter: ServedAdapter) -> str:
    """The version served now, for a log: its digest, else the path that only workers read; empty where not served."""
    return adapter.digest or str(getattr(adapter.request, "lora_path", ""))
