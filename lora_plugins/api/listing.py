"""The answers of `GET /v1/loras` and `GET /v1/loras/NAME`: every name with state, version, tiers and requests.

Runs in the leading API server for each call of these routes. In: the registry, the engines' states of adapters
(`lifecycle/planner_client.py`), the store. Out: models of `models.py`. A name is *served*, or *blocked* by an operator,
or *draining*: unloaded, while requests still run. A server of 100,000 names must go on answering other requests: the
list comes in pages, and long loops run in threads, or in steps that let other tasks of the event loop run.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection, Iterable
from typing import Any

from lora_plugins.adapter.names import covering
from lora_plugins.adapter.paced_work import paced
from lora_plugins.api import models
from lora_plugins.api.access.principals import shown
from lora_plugins.lifecycle.background_tasks import in_steps
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.planner_client import AdapterStates
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import Registry, ServedAdapter
from lora_plugins.store.store import Store

MAX_LIMIT = 1_000

# Fields that a row copies from the served version.
_OF_VERSION = ("source", "uri", "version", "digest", "size_bytes", "rank", "warnings")
# A name and its draining adapter; None for the row of what the name serves now, or of a blocked name. A name that is
# loaded again while an earlier adapter drains has two rows.
_Row = tuple[str, ServedAdapter | None]


async def list_of(
    lifecycle: Lifecycle, reconciler: Reconciler | None, limit: int, after: str | None
) -> models.AdapterList:
    """Return a page of at most `limit` names in alphabetical order: the names after `after`, or the first page."""
    registry = lifecycle.registry
    # Copy both in the event loop, before a thread goes through them: neither may change during iteration.
    served, draining = registry.names(), list(registry.draining.values())
    rows, blocked, count, following = await asyncio.to_thread(_page, registry, served, draining, limit, after)
    views = await _views(rows, blocked, lifecycle)
    # The declared set comes on the first page only, so that a reader of all pages gets one state.
    declared = None if reconciler is None or after is not None else await _declared(reconciler)
    # An empty `short_of` of an engine says that no option of vLLM makes requests wait.
    engines = (await lifecycle.planner.figures()).values()
    is_paused, short_of = any(it.is_paused for it in engines), max((it.stats.short_of for it in engines), default="")
    return models.AdapterList(
        loras=views, count=count, is_paused=is_paused, short_of=short_of, declared=declared, next=following
    )


async def json_of(listed: models.AdapterList) -> str:
    """Return a list as JSON.

    The declared set comes whole, with as many rows as a file of 1 MiB has, so its rows are written in steps.
    """
    if listed.declared is None:
        return listed.model_dump_json()
    rows, listed.declared.loras = listed.declared.loras, []
    written = ",".join([row.model_dump_json() async for row in in_steps(rows)])
    # Put the rows where the empty list stands. The key occurs once: in a name, JSON would escape the key's quotes.
    key = '"declared":{"loras":['
    return listed.model_dump_json().replace(key, key + written, 1)


def _page(
    registry: Registry, served: list[str], draining: list[ServedAdapter], limit: int, after: str | None
) -> tuple[list[_Row], Collection[str], int, str | None]:
    """Return a page's rows, all blocked names, the number of rows of all pages, and the next page's `after`, if any."""
    blocked, leaving = registry.blocked.names(), {adapter.name for adapter in draining}
    rows: list[_Row] = [(name, None) for name in paced(served)]
    rows += ((adapter.name, adapter) for adapter in draining)
    # A blocked name that is served or draining has a row already.
    rows += ((name, None) for name in blocked if name not in leaving and not registry.serves(name))
    names = (name for name, _ in paced(rows) if after is None or name > after)
    # Names of `limit` and one more, which says that a page follows; twice as many rows, because a name may have two.
    found = sorted(set(heapq.nsmallest(2 * limit + 2, names)))
    wanted = set(found[:limit])
    chosen = sorted((row for row in paced(rows) if row[0] in wanted), key=lambda row: row[0])
    return chosen, blocked, len(rows), found[limit - 1] if found[limit:] else None


async def view_of(name: str, lifecycle: Lifecycle) -> models.AdapterView | None:
    """The row of one name; None where the name is neither served nor draining nor blocked."""
    registry = lifecycle.registry
    is_served, blocked = registry.serves(name), [name] if name in registry.blocked else []
    # Of a name with two rows, show what new requests get.
    leaving = None if is_served else next((one for one in registry.draining.values() if one.name == name), None)
    if not is_served and leaving is None and not blocked:
        return None  # without asking the engines
    views = await _views([(name, leaving)], blocked, lifecycle)
    return views[0] if views else None


async def _views(rows: Iterable[_Row], blocked: Collection[str], lifecycle: Lifecycle) -> list[models.AdapterView]:
    """The models of rows; a row whose name is neither served nor draining nor in `blocked` is left out."""
    registry, store = lifecycle.registry, lifecycle.server.resolver.store
    state_of = await lifecycle.planner.states()
    known = [(name, leaving or registry.get(name), leaving is not None) for name, leaving in rows]
    # The name of a row may have been unloaded since the page was made.
    known = [row for row in known if row[1] is not None or row[0] in blocked]
    # In a thread, because the store may be on a slow file system; one call for all rows, because a call costs more than
    # a look at one directory.
    stored = await asyncio.to_thread(_are_stored, store, [adapter for _, adapter, _ in known])
    return [
        _view(name, adapter, blocked, lifecycle, state_of, is_leaving=is_leaving, is_stored=is_stored)
        async for (name, adapter, is_leaving), is_stored in in_steps(list(zip(known, stored, strict=True)))
    ]


def _are_stored(store: Store, adapters: Iterable[ServedAdapter | None]) -> list[bool]:
    """For each adapter, whether the store has the served version's files; False for a name that is only blocked."""
    return [it is not None and it.version is not None and store.has(it.version.path) for it in adapters]


def _view(
    name: str,
    adapter: ServedAdapter | None,
    blocked: Collection[str],
    lifecycle: Lifecycle,
    state_of: AdapterStates,
    *,
    is_leaving: bool,
    is_stored: bool,
) -> models.AdapterView:
    registry = lifecycle.registry
    # Draining adapters have rows of their own: requests of a draining adapter count in no other row of the name.
    adapter_id, draining = registry.adapter_id(name), registry.draining
    if adapter is None:  # `_views` leaves out such a name unless it is blocked
        return models.AdapterView(lora_name=name, lora_id=adapter_id, state=models.ServedState.BLOCKED)
    is_blocked = not covering(name).isdisjoint(blocked)
    state = models.ServedState.PAUSED if name in registry.paused else models.ServedState.SERVING
    # Of several states, show the strongest: draining, then blocked, then paused.
    state = models.ServedState.DRAINING if is_leaving else models.ServedState.BLOCKED if is_blocked else state
    engine_id = adapter.engine_id
    in_engines = state_of(engine_id) if engine_id in draining else state_of.of_name(name, engine_id, draining)
    version, error = adapter.version, adapter.last_error
    tiers = {"store": is_stored, "host": in_engines.is_loaded, "slot": in_engines.is_active}
    # Of an adapter that only workers have, the size in host memory is all that is known.
    known: dict[str, Any] = {"size_bytes": in_engines.size_bytes}
    if version is not None:
        known = {field: getattr(version, field) for field in _OF_VERSION}
    return models.AdapterView(
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
        last_error=error and models.LastError(code=error[0].code, message=str(shown(error[0])), at=error[1]),
        **known,
    )


async def _declared(reconciler: Reconciler) -> models.DeclaredSetView | None:
    """The adapters of LORA_PLUGINS_ADAPTERS_FILE; None without the file."""
    if (declared := reconciler.declared) is None:
        return None
    views = []
    async for name, target in in_steps(list(declared.items())):
        error = None if target.error is None else str(target.error)
        not_served = models.DeclaredState.WAITING if error is None else models.DeclaredState.FAILED
        state = models.DeclaredState.SERVED if target.is_done else not_served
        views.append(models.DeclaredView(lora_name=name, state=state, error=error))
    wrong = reconciler.file_error
    return models.DeclaredSetView(loras=views, file_error=None if wrong is None else str(wrong))
