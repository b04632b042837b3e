"""The routes of the admin API; what they do is in `lora_plugins.server.lifecycle` and its parts.

vLLM's `--api-key` guards them, as everything below /v1, and an access policy lets administrators in only. Errors have
vLLM's shape, with our code in the message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request

from lora_plugins.api.http_errors import http_error
from lora_plugins.api.models import (
    AdapterList,
    AdapterStatus,
    AdapterView,
    LastError,
    LoadAdapterRequest,
    RollbackRequest,
    State,
)
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.process import settings_of_server
from lora_plugins.server.lifecycle import Changes
from lora_plugins.server.planner_client import Place
from lora_plugins.server.registry import Served, not_served
from lora_plugins.vllm_patches.access import require_admin
from lora_plugins.vllm_patches.serving_models import changes

router = APIRouter(prefix="/v1/loras", tags=["LoRA adapters"], dependencies=[Depends(require_admin)])


def _changes(request: Request) -> Changes:
    return changes(request.app.state.openai_serving_models)


_Changes = Annotated[Changes, Depends(_changes)]


@asynccontextmanager
async def _as_http() -> AsyncIterator[None]:
    try:
        yield
    except LoRAPluginsError as error:
        raise http_error(error) from None


@router.post("")
async def load(body: LoadAdapterRequest, known: _Changes) -> AdapterStatus:
    """Serve an adapter under a name, from a URI or from wherever the server's sources have it. Idempotent."""
    async with _as_http():
        served, is_new = await known.load(body.lora_name, None if body.source is None else body.source.uri)
    return _status(known, served.name, "loaded" if is_new else "is served")


@router.get("")
async def list_all(known: _Changes) -> AdapterList:
    """What is served, what still drains, and which names are blocked."""
    place_of = await known.planner.places()
    views = [_view(served, place_of(served.request.lora_int_id), known) for served in known.catalogue.all()]
    names = {view.lora_name for view in views}
    for served in known.catalogue.draining.values():
        views.append(_view(served, place_of(served.request.lora_int_id), known, State.DRAINING))
        names.add(served.name)
    views += [_blocked(name, known) for name in sorted(known.catalogue.blocked - names)]
    return AdapterList(loras=views, count=len(views))


@router.get("/{lora_name:path}")
async def show(lora_name: str, known: _Changes) -> AdapterView:
    """One adapter, as in the list."""
    served = known.catalogue.get(lora_name)
    if served is not None:
        return _view(served, (await known.planner.places())(served.request.lora_int_id), known)
    for draining in known.catalogue.draining.values():
        if draining.name == lora_name:
            place = (await known.planner.places())(draining.request.lora_int_id)
            return _view(draining, place, known, State.DRAINING)
    if lora_name in known.catalogue.blocked:
        return _blocked(lora_name, known)
    raise http_error(not_served(lora_name))


@router.delete("/{lora_name:path}")
async def unload(
    lora_name: str,
    known: _Changes,
    block: Annotated[bool, Query(description="refuse the name from here on, until it is loaded again")] = False,
    timeout_s: Annotated[
        float | None, Query(ge=0, le=86_400, description="how long running requests have before they are ended")
    ] = None,
) -> AdapterStatus:
    """Serve a name no longer, let its requests finish, and free its slot, host memory and lease."""
    limit_s = settings_of_server().drain_timeout_s if timeout_s is None else timeout_s
    async with _as_http():
        is_free = await known.unload(lora_name, block=block, timeout_s=limit_s)
    if is_free:
        return _status(known, lora_name, "unloaded" + (" and blocked" if block else ""))
    return _status(known, lora_name, "unloaded; requests that still run keep its memory until they end", "draining")


@router.post("/{lora_name:path}/prefetch")
async def prefetch(lora_name: str, known: _Changes) -> AdapterStatus:
    """Bring an adapter into the workers' host memory before it is asked for."""
    async with _as_http():
        await known.prefetch(lora_name)
    return _status(known, lora_name, "is in host memory")


@router.post("/{lora_name:path}/pin")
async def pin(lora_name: str, known: _Changes) -> AdapterStatus:
    """Keep an adapter in host memory and in a slot."""
    async with _as_http():
        await known.pin(lora_name)
    return _status(known, lora_name, "pinned")


@router.post("/{lora_name:path}/unpin")
async def unpin(lora_name: str, known: _Changes) -> AdapterStatus:
    """Let a pinned adapter go when its turn comes."""
    async with _as_http():
        await known.unpin(lora_name)
    return _status(known, lora_name, "unpinned")


@router.post("/{lora_name:path}/refresh")
async def refresh(lora_name: str, known: _Changes) -> AdapterStatus:
    """Look for a new version at the source now, and swap to it; ends the effect of a rollback."""
    async with _as_http():
        is_swapped = await known.refresh(lora_name)
    return _status(known, lora_name, "swapped to a new version" if is_swapped else "serves the newest version")


@router.post("/{lora_name:path}/rollback")
async def rollback(
    lora_name: str, known: _Changes, body: Annotated[RollbackRequest | None, Body()] = None
) -> AdapterStatus:
    """Go back to the version before, or to a kept one, and stay there until the next refresh."""
    async with _as_http():
        served = await known.rollback(lora_name, None if body is None else body.digest)
    return _status(known, lora_name, f"rolled back to {(served.held_digest or '')[:12]}")


def _status(known: Changes, name: str, what: str, status: str = "success") -> AdapterStatus:
    message = f"LoRA adapter '{name}' {what}."
    return AdapterStatus(status=status, message=message, lora_name=name, lora_id=known.catalogue.lora_id(name))


def _view(served: Served, place: Place, known: Changes, state: State = State.SERVING) -> AdapterView:
    version, engine_id = served.version, served.request.lora_int_id
    tiers: dict[str, Any] = {"store": version is not None, "host": place.host, "slot": place.slot}
    error = None
    if served.last_error is not None:
        error = LastError(code=served.last_error[0].code, message=str(served.last_error[0]), at=served.last_error[1])
    return AdapterView(
        lora_name=served.name,
        lora_id=known.catalogue.lora_id(served.name),
        state=state,
        source=None if version is None else version.source,
        uri=None if version is None else version.uri,
        version=None if version is None else version.version,
        digest=None if version is None else version.digest,
        path=served.request.lora_path,
        size_bytes=place.size_bytes or (0 if version is None else version.size_bytes),
        rank=None if version is None else version.rank,
        tiers=[name for name, is_there in tiers.items() if is_there],
        requests_in_flight=len(place.running),
        requests_held=len(place.held),
        last_used_at=known.planner.used_at.get(engine_id),
        pinned=served.is_pinned,
        pinned_digest=served.held_digest,
        previous_digests=[kept.digest for kept in served.previous],
        last_error=error,
    )


def _blocked(name: str, known: Changes) -> AdapterView:
    return AdapterView(lora_name=name, lora_id=known.catalogue.lora_id(name), state=State.BLOCKED)
