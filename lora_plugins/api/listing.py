"""The list of all adapters, made in steps, so that a server of 100,000 names goes on answering other requests."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from lora_plugins.adapter.pace import paced
from lora_plugins.api.models import AdapterView, DeclaredState, DeclaredView, LastError, ServedState
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.planner_client import AdapterStates
from lora_plugins.server.reconciler import Reconciler, Target
from lora_plugins.server.registry import Registry, ServedAdapter
from lora_plugins.store.store import Store

MAX_LIMIT = 10_000
_AT_ONCE = 100  # rows between two turns of the event loop: two milliseconds
_LOOKED_AT = 1_000  # copies in one call of a thread

_OF_VERSION = ("source", "uri", "version", "digest", "size_bytes", "rank", "warnings")
_T = TypeVar("_T")
_ROWS: TypeAdapter[list[AdapterView]] = TypeAdapter(list[AdapterView])
_DECLARED: TypeAdapter[list[DeclaredView]] = TypeAdapter(list[DeclaredView])
_TEXT: TypeAdapter[str | None] = TypeAdapter(str | None)


@dataclass(frozen=True, slots=True)
class Page:
    """The adapters of a list, or of a part of a list.

    Attributes:
        rows: a name for new requests, or a blocked name, with None; or a name with an adapter that only drains.
        blocked: every blocked name.
        count: rows of the whole list; None where the page is the whole list.
        next: the name after which the next page begins; None on the last page.
    """

    rows: Sequence[tuple[str, ServedAdapter | None]]
    blocked: Collection[str]
    count: int | None = None
    next: str | None = None


async def page_of(registry: Registry, limit: int | None, after: str | None) -> Page:
    """The whole list; with a limit, at most so many names in alphabetical order, after the name `after`."""
    # Copy both in the event loop, before a thread goes through them: neither may change during iteration.
    served, draining = registry.names(), list(registry.draining.values())
    return await asyncio.to_thread(_page, registry, served, draining, limit, after)


def _page(
    registry: Registry, served: list[str], draining: list[ServedAdapter], limit: int | None, after: str | None
) -> Page:
    blocked, leaving = registry.blocked.names(), {adapter.name for adapter in draining}
    only_blocked = sorted(name for name in blocked if name not in leaving and not registry.serves(name))
    rows: list[tuple[str, ServedAdapter | None]] = [(name, None) for name in paced(served)]
    rows += [*((adapter.name, adapter) for adapter in draining), *((name, None) for name in only_blocked)]
    if limit is None and after is None:
        return Page(rows, blocked)
    limit = limit or MAX_LIMIT
    names = (name for name, _ in paced(rows) if after is None or name > after)
    # Twice the limit: a name may appear twice, as served and as draining.
    found = sorted(set(heapq.nsmallest(2 * limit + 2, names)))
    wanted = set(found[:limit])
    chosen = sorted((row for row in paced(rows) if row[0] in wanted), key=lambda row: row[0])
    return Page(chosen, blocked, len(rows), found[limit - 1] if found[limit:] else None)


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


async def view_of(name: str, lifecycle: Lifecycle) -> AdapterView | None:
    """The row of one name; None where the name is neither served nor draining nor blocked."""
    registry = lifecycle.registry
    is_served, blocked = registry.serves(name), [name] if name in registry.blocked else []
    leaving = None if is_served else next((one for one in registry.draining.values() if one.name == name), None)
    if not is_served and leaving is None and not blocked:
        return None
    parts = _views(Page([(name, leaving)], blocked), lifecycle, await lifecycle.planner.states())
    views = [view async for part in parts for view in part]
    return views[0] if views else None


async def _views(page: Page, lifecycle: Lifecycle, state_of: AdapterStates) -> AsyncIterator[list[AdapterView]]:
    """Rows in parts; a thread asks the store, which may be on a slow file system."""
    registry, store = lifecycle.registry, lifecycle.server.resolver.store
    for part in _parts(page.rows, _LOOKED_AT):
        known = [(name, leaving or registry.get(name), leaving is not None) for name, leaving in part]
        # A name of the page may be gone from the registry by now.
        rows = [row for row in known if row[1] is not None or row[0] in page.blocked]
        # One call of a thread for 1,000 copies: a call for each would cost more than the looks.
        stored = await asyncio.to_thread(_are_stored, store, [adapter for _, adapter, _ in rows])
        # Making rows takes the event loop, so give other requests a turn after each part.
        for some in _parts(list(zip(rows, stored, strict=True))):
            yield [
                _view(name, adapter, page, lifecycle, state_of, is_leaving=is_leaving, is_stored=is_stored)
                for (name, adapter, is_leaving), is_stored in some
            ]
            await asyncio.sleep(0)


def _are_stored(store: Store, adapters: Iterable[ServedAdapter | None]) -> list[bool]:
    return [it is not None and it.version is not None and store.has(it.version.path) for it in adapters]


def _view(
    name: str,
    adapter: ServedAdapter | None,
    page: Page,
    lifecycle: Lifecycle,
    state_of: AdapterStates,
    *,
    is_leaving: bool,
    is_stored: bool,
) -> AdapterView:
    registry = lifecycle.registry
    adapter_id, draining = registry.adapter_id(name), registry.draining  # rows of their own
    if adapter is None:
        return AdapterView(lora_name=name, lora_id=adapter_id, state=ServedState.BLOCKED)
    is_blocked = name in page.blocked or name.partition("@")[0] in page.blocked
    state = ServedState.PAUSED if name in registry.paused else ServedState.SERVING
    # A block goes before a pause.
    state = ServedState.DRAINING if is_leaving else ServedState.BLOCKED if is_blocked else state
    engine_id = adapter.engine_id
    in_engines = state_of(engine_id) if engine_id in draining else state_of.of_name(name, engine_id, draining)
    version, error = adapter.version, adapter.last_error
    tiers = {"store": is_stored, "host": in_engines.is_loaded, "slot": in_engines.is_active}
    known: dict[str, Any] = {"size_bytes": in_engines.size_bytes}
    if version is not None:
        known = {field: getattr(version, field) for field in _OF_VERSION}
    return AdapterView(
        lora_name=name,
        lora_id=adapter_id,
        state=state,
        path=adapter.request.lora_path,
        tiers=[tier for tier, is_there in tiers.items() if is_there],
        requests_in_flight=len(in_engines.running),
        requests_held=len(in_engines.held),
        last_used_at=lifecycle.planner.used_at.get(adapter.engine_id),
        pinned=adapter.is_pinned,
        pinned_digest=adapter.held_digest,
        previous_digests=[kept.digest for kept in adapter.previous],
        last_error=error and LastError(code=error[0].code, message=str(error[0]), at=error[1]),
        **known,
    )


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
