"""The list of all adapters, made in steps, so that a server of 100,000 names goes on answering other requests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from lora_plugins.adapter.pace import paced
from lora_plugins.api.models import AdapterView, DeclaredState, DeclaredView, LastError, ServedState
from lora_plugins.scheduler.messages import AdapterState
from lora_plugins.server.desired import Target
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.planner_client import AdapterStates
from lora_plugins.server.reconciler import Reconciler
from lora_plugins.server.registry import Registry, ServedAdapter

MAX_LIMIT = 10_000
_AT_ONCE = 100  # rows between two turns of the event loop: two milliseconds
_LOOKED_AT = 1_000  # copies in one call of a thread

_T = TypeVar("_T")
_ROWS: TypeAdapter[list[AdapterView]] = TypeAdapter(list[AdapterView])
_DECLARED: TypeAdapter[list[DeclaredView]] = TypeAdapter(list[DeclaredView])
_TEXT: TypeAdapter[str | None] = TypeAdapter(str | None)


@dataclass(frozen=True, slots=True)
class Page:
    """The adapters of a list, or of a part of a list.

    Attributes:
        served, draining, blocked: names for new requests, adapters that only drain, and other blocked names.
        all_blocked: every blocked name.
        count: rows of the whole list; None where the page is the whole list.
        next: the name after which the next page begins; None on the last page.
    """

    served: Sequence[str]
    draining: Sequence[ServedAdapter]
    blocked: Sequence[str]
    all_blocked: set[str]
    count: int | None
    next: str | None = None


async def page_of(registry: Registry, limit: int | None, after: str | None) -> Page:
    """The whole list; with a limit, at most so many names in alphabetical order, after the name `after`."""
    # Copy both in the event loop, before a thread goes through them: neither may change during iteration.
    served, draining = registry.names(), list(registry.draining.values())
    return await asyncio.to_thread(_page, registry, served, draining, limit, after)


def _page(
    registry: Registry, served: list[str], draining: list[ServedAdapter], limit: int | None, after: str | None
) -> Page:
    blocked = registry.blocked.names()
    leaving = {adapter.name for adapter in draining}
    only_blocked = sorted(name for name in blocked if name not in leaving and not registry.serves(name))
    if limit is None and after is None:
        return Page(served, draining, only_blocked, blocked, None)
    names = (name for name in itertools.chain(paced(served), leaving, only_blocked) if after is None or name > after)
    # Twice the limit: a name may appear twice, as served and as draining.
    found = sorted(set(heapq.nsmallest(2 * (limit or MAX_LIMIT) + 2, names)))
    chosen, rest = found[: limit or MAX_LIMIT], found[limit or MAX_LIMIT :]
    wanted = set(chosen)
    return Page(
        [name for name in chosen if registry.serves(name)],
        [adapter for adapter in draining if adapter.name in wanted],
        [name for name in only_blocked if name in wanted],
        blocked,
        len(served) + len(draining) + len(only_blocked),
        chosen[-1] if rest else None,
    )


async def json_of(
    page: Page, lifecycle: Lifecycle, state_of: AdapterStates, reconciler: Reconciler | None
) -> AsyncIterator[bytes]:
    """The body of the answer, an `AdapterList`, in parts."""
    count, begin = 0, b'{"loras":['
    async for views in _views(page, lifecycle, state_of):
        if views:
            # Without the brackets of the part's own list.
            yield begin + _ROWS.dump_json(views)[1:-1]
            count, begin = count + len(views), b","
    # Without any row, no part has begun the list.
    if not count:
        yield begin
    yield b'],"declared":'
    async for part in _declared(reconciler):
        yield part
    yield b',"count":%d,"next":%s}' % (count if page.count is None else page.count, _TEXT.dump_json(page.next))


async def _views(page: Page, lifecycle: Lifecycle, state_of: AdapterStates) -> AsyncIterator[list[AdapterView]]:
    registry = lifecycle.registry
    for names in _parts(page.served, _LOOKED_AT):
        # A name of the page may be gone from the registry by now.
        adapters = [adapter for name in names if (adapter := registry.get(name)) is not None]
        states = [
            served_state(
                adapter.name,
                registry,
                is_blocked=adapter.name in page.all_blocked or adapter.name.partition("@")[0] in page.all_blocked,
            )
            for adapter in adapters
        ]
        async for views in _looked_at(adapters, states, lifecycle, state_of):
            yield views
    for draining in _parts(page.draining, _LOOKED_AT):
        async for views in _looked_at(draining, [ServedState.DRAINING] * len(draining), lifecycle, state_of):
            yield views
    for names in _parts(page.blocked):
        yield [blocked_view(name, lifecycle) for name in names]
        await asyncio.sleep(0)


def served_state(name: str, registry: Registry, *, is_blocked: bool) -> ServedState:
    """The state of a served name; a block goes before a pause."""
    if is_blocked:
        return ServedState.BLOCKED
    return ServedState.PAUSED if name in registry.paused else ServedState.SERVING


async def views_of(
    adapters: Sequence[ServedAdapter], states: Sequence[ServedState], lifecycle: Lifecycle, state_of: AdapterStates
) -> list[AdapterView]:
    """Rows of a few adapters."""
    return [view async for views in _looked_at(adapters, states, lifecycle, state_of) for view in views]


async def _looked_at(
    adapters: Sequence[ServedAdapter], states: Sequence[ServedState], lifecycle: Lifecycle, state_of: AdapterStates
) -> AsyncIterator[list[AdapterView]]:
    """Rows of some adapters, in parts; a thread asks the store, which may be on a slow file system."""
    store = lifecycle.server.resolver.store

    def look() -> list[bool]:
        return [it.version is not None and store.has(it.version.path) for it in adapters]

    # One call of a thread for 1,000 copies: a call for each would cost more than the looks.
    rows = list(zip(adapters, states, await asyncio.to_thread(look), strict=True))
    draining = lifecycle.registry.draining  # rows of their own

    def in_engines(adapter: ServedAdapter) -> AdapterState:
        if adapter.engine_id in draining:
            return state_of(adapter.engine_id)
        return state_of.of_name(adapter.name, adapter.engine_id, draining)

    # Making rows takes the event loop, so give other requests a turn after each part.
    for part in _parts(rows):
        yield [
            _view(adapter, in_engines(adapter), lifecycle, state, is_stored=is_stored)
            for adapter, state, is_stored in part
        ]
        await asyncio.sleep(0)


def _view(
    adapter: ServedAdapter, in_engines: AdapterState, lifecycle: Lifecycle, state: ServedState, *, is_stored: bool
) -> AdapterView:
    version = adapter.version
    tiers: dict[str, Any] = {"store": is_stored, "host": in_engines.is_loaded, "slot": in_engines.is_active}
    error = None
    if adapter.last_error is not None:
        error = LastError(code=adapter.last_error[0].code, message=str(adapter.last_error[0]), at=adapter.last_error[1])
    return AdapterView(
        lora_name=adapter.name,
        lora_id=lifecycle.registry.adapter_id(adapter.name),
        state=state,
        source=None if version is None else version.source,
        uri=None if version is None else version.uri,
        version=None if version is None else version.version,
        digest=None if version is None else version.digest,
        path=adapter.request.lora_path,
        size_bytes=in_engines.size_bytes if version is None else version.size_bytes,
        rank=None if version is None else version.rank,
        tiers=[name for name, is_there in tiers.items() if is_there],
        requests_in_flight=len(in_engines.running),
        requests_held=len(in_engines.held),
        last_used_at=lifecycle.planner.used_at.get(adapter.engine_id),
        pinned=adapter.is_pinned,
        pinned_digest=adapter.held_digest,
        previous_digests=[kept.digest for kept in adapter.previous],
        last_error=error,
        warnings=[] if version is None else list(version.warnings),
    )


def blocked_view(name: str, lifecycle: Lifecycle) -> AdapterView:
    """The row of a blocked name that is neither served nor draining."""
    return AdapterView(lora_name=name, lora_id=lifecycle.registry.adapter_id(name), state=ServedState.BLOCKED)


async def _declared(reconciler: Reconciler | None) -> AsyncIterator[bytes]:
    """A `DeclaredSetView`, or null."""
    if reconciler is None or (declared := reconciler.declared) is None:
        yield b"null"
        return
    begin = b'{"loras":['
    for part in _parts(list(declared.items())):
        yield begin + _DECLARED.dump_json([_declared_view(name, target) for name, target in part])[1:-1]
        begin = b","
        await asyncio.sleep(0)
    error = reconciler.file_error
    end = b'],"file_error":%s}' % _TEXT.dump_json(None if error is None else str(error))
    yield end if begin == b"," else begin + end


def _declared_view(name: str, target: Target) -> DeclaredView:
    state = DeclaredState.WAITING if target.error is None else DeclaredState.FAILED
    error = None if target.error is None else str(target.error)
    return DeclaredView(lora_name=name, state=DeclaredState.SERVED if target.is_done else state, error=error)


def _parts(items: Sequence[_T], size: int = _AT_ONCE) -> Iterable[Sequence[_T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
