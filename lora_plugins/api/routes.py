"""The routes of the admin API below `/v1/loras`, for operators and trainers.

Run in the event loop of vLLM's API server. Each route reads the request, calls `Lifecycle`, which does the
work, and answers with a model of `models.py`. `access/administrators.py` decides who may call them. Errors have vLLM's
shape, with this package's code in the message and the error's fields beside.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from starlette.requests import ClientDisconnect

from lora_plugins.adapter.chat import CHAT_FILES, GENERATION_FILE, Chat
from lora_plugins.api import models
from lora_plugins.api.access.policy import Principal
from lora_plugins.api.access.principals import principal_of_request, require_admin, share_of_request, shown
from lora_plugins.api.http_errors import body_of, headers_of
from lora_plugins.api.listing import MAX_LIMIT, json_of, list_of, view_of
from lora_plugins.api.push_body import receive
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError
from lora_plugins.lifecycle.arrivals import Body
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.lifecycle.reconciler import Reconciler
from lora_plugins.lifecycle.registry import ANY_VERSION
from lora_plugins.lifecycle.swapping import KEPT_VERSIONS, ChangeReason, VersionChange
from lora_plugins.log import logger
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.store.layout import is_digest

_REFRESHED = {
    ChangeReason.SWAPPED: "swapped to a new version",
    ChangeReason.REPAIRED: "was fetched and loaded again, as its copy was damaged",
    ChangeReason.UNCHANGED: "serves the newest version",
}


class _Route(APIRoute):
    """A route that answers our errors itself: vLLM's own answer has no place for the error's fields."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:  # no fault of the server's: one line of the log, and nobody reads the answer
                name = request.path_params["lora_name"]
                logger.info("The client of a push of adapter '%s' left before the end of the body", name)
                raise HTTPException(400, "the client has left") from None
            except LoRAPluginsError as error:
                return JSONResponse(body_of(shown(error)), error.http_status, headers_of(error))

        return answer


router = APIRouter(
    prefix="/v1/loras", tags=["LoRA adapters"], dependencies=[Depends(require_admin)], route_class=_Route
)


def _lifecycle(request: Request) -> Lifecycle:
    return request.app.state.lora_plugins_lifecycle  # type: ignore[no-any-return]


def _reconciler(request: Request) -> Reconciler | None:
    return getattr(request.app.state, "lora_plugins_reconciler", None)  # absent while the server starts


def _pushes(request: Request) -> Pushes:
    return request.app.state.lora_plugins_pushes  # type: ignore[no-any-return]


def _expected_digest(
    if_match: Annotated[
        list[str] | None, Header(description="the digest that must be served now, or *; else 412 and no change")
    ] = None,
) -> str | None:
    """The digest of an If-Match header, bare or in quotes as an ETag, or `*` for any served version; None without one.

    Raises:
        InvalidAdapter: the header has another text, or none: a caller who has lost the digest must not change a
            version that the caller does not know.
    """
    if if_match is None:
        return None
    # A header may come in several lines; two digests then fail the check below.
    text = ", ".join(if_match)
    if text == ANY_VERSION:
        return text
    digest = text[1:-1] if text[:1] == text[-1:] == '"' else text
    if not is_digest(digest):
        raise InvalidAdapter(
            f"If-Match: {text[:80]}",
            expected="the 64 characters of a digest, as they are or in quotes, or *",
            remedy="send the digest that GET /v1/loras shows, or leave the header out",
        )
    return digest


_Lifecycle = Annotated[Lifecycle, Depends(_lifecycle)]
_Reconciler = Annotated[Reconciler | None, Depends(_reconciler)]
_Pushes = Annotated[Pushes, Depends(_pushes)]
_Expected = Annotated[str | None, Depends(_expected_digest)]


@router.post("")
async def load(
    body: models.LoadAdapterRequest, lifecycle: _Lifecycle, expects: _Expected = None
) -> models.VersionStatus:
    """Serve an adapter under a name, from a URI or from any source of the server that has the name. Idempotent."""
    uri = None if body.source is None else body.source.uri
    async with _changing(lifecycle) as began:
        change = await lifecycle.load(body.lora_name, uri, expects=expects)
    done = "loaded" if change.reason is ChangeReason.LOADED else "is served"
    return _version_status(lifecycle, body.lora_name, done, change, began)


@router.get("", response_model=models.AdapterList)
async def list_all(
    lifecycle: _Lifecycle,
    reconciler: _Reconciler,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="a page of so many names, by name")] = MAX_LIMIT,
    after: Annotated[str | None, Query(description="the page that begins after this name: `next` of the last")] = None,
) -> Response:
    """Served and draining adapters, blocked names, and the state of the declared set."""
    listed = await list_of(lifecycle, reconciler, limit, after)
    # As it is: FastAPI would check the rows once more.
    return Response(await json_of(listed), media_type="application/json")


@router.put("/{lora_name:path}")
async def push(
    *,
    lora_name: models.Name,
    request: Request,
    lifecycle: _Lifecycle,
    pushes: _Pushes,
    mode: Annotated[
        Literal["finish", "inflight"],
        Query(description="whether running requests finish on the weights that they began with, or go on with the new"),
    ] = "finish",
    pin: Annotated[
        bool,
        BeforeValidator(lambda text: text == "" or text),
        Query(description="keep the adapter in host memory and in a slot; where that cannot be, nothing is served"),
    ] = False,
    keep: Annotated[
        int, Query(ge=0, le=100, description="how many earlier versions stay in the store, as NAME@DIGEST")
    ] = KEPT_VERSIONS,
    expects: _Expected = None,
) -> models.PushStatus:
    """Serve the adapter in the body as the next version of a name; `lora_plugins.client` sends such bodies.

    The body is a safetensors file with adapter_config.json in its metadata, the files of a PEFT directory as
    multipart/form-data, or a tar archive of the directory. Content-Digest is compared.
    """
    headers = request.headers
    length = headers.get("content-length", "")
    # A chunked body has no length; `receive` counts the bytes in both cases.
    content_bytes = int(length) if length.isdecimal() else None
    principal, settings = _caller(), lifecycle.server.resolver.settings
    # A template is a program that runs in the server, and added tokens have it keep a further tokenizer: a tenant's are
    # none that the operator has chosen.
    leaves_out = {*CHAT_FILES} - {GENERATION_FILE} if principal.is_pusher else ()
    receive_body = partial(
        receive,
        content_type=headers.get("content-type", ""),
        content_bytes=content_bytes,
        max_bytes=settings.max_adapter_bytes,
        content_digest=", ".join(headers.getlist("content-digest")),
        content_encoding=", ".join(headers.getlist("content-encoding")),
        leaves_out=leaves_out,
    )
    async with _changing(lifecycle) as began:
        if principal.pushes_per_minute is not None:
            pushes.count(principal.label, principal.pushes_per_minute)
        pushed = await pushes.push(
            lora_name,
            Body(aiter(request.stream()), content_bytes, share_of_request(), principal.owns),
            receive_body,
            expects=expects,
            moves=mode == "inflight",
            pins=pin,
            kept_versions=keep,
        )
    timings = models.PushTimings(
        waited_ms=_ms(pushed.waited_s), received_ms=_ms(pushed.received_s), served_ms=_ms(pushed.served_s)
    )
    serves = f"serves what was pushed, {(pushed.change.after or '')[:12]}"
    if pushed.left_out:
        serves += f", without {', '.join(sorted(pushed.left_out))}, which only administrators may bring"
    done = _version_status(lifecycle, lora_name, serves, pushed.change, began)
    return models.PushStatus(**done.model_dump(), timings=timings)


@router.get("/{lora_name:path}")
async def show(lora_name: models.Name, lifecycle: _Lifecycle) -> models.AdapterView:
    """One adapter, as in the list."""
    view = await view_of(lora_name, lifecycle)
    if view is None:
        raise lifecycle.registry.not_served(lora_name)
    if view.path is not None:
        view.chat = await _chat_view(view.path, lifecycle)
    return view


@router.delete("/{lora_name:path}")
async def unload(
    lora_name: models.Name,
    lifecycle: _Lifecycle,
    block: Annotated[bool, Query(description="refuse the name from here on, until it is loaded again")] = False,
    timeout_s: Annotated[
        float | None, Query(ge=0, le=86_400, description="how long running requests have before they are ended")
    ] = None,
    expects: _Expected = None,
) -> models.AdapterStatus:
    """Stop serving a name, let its requests finish, and free its slot, host memory and lease.

    `block` covers all revisions of the name, on every server of the store; without `timeout_s`, the answer comes at
    once. A tenant blocks served names only: blocks stay, and the pushes before them are counted.
    """
    if block and _caller().is_pusher and lifecycle.registry.get(lora_name) is None:
        raise lifecycle.registry.not_served(lora_name)
    async with nullcontext() if block else _changing(lifecycle):  # a block is on disk by itself
        is_free = await lifecycle.unload(lora_name, block=block, timeout_s=timeout_s, expects=expects)
    done = "unloaded and blocked" if block else "unloaded"
    if is_free:
        return _status(lifecycle, lora_name, done)
    return _status(lifecycle, lora_name, f"{done}; requests that still run keep its memory until they end", "draining")


@router.post("/{lora_name:path}/prefetch")
async def prefetch(lora_name: models.Name, lifecycle: _Lifecycle, expects: _Expected = None) -> models.AdapterStatus:
    """Bring an adapter into the workers' host memory before any request."""
    async with _changing(lifecycle):
        await lifecycle.prefetch(lora_name, expects=expects)
    return _status(lifecycle, lora_name, "is in host memory")


@router.post("/{lora_name:path}/pin")
async def pin(lora_name: models.Name, lifecycle: _Lifecycle, expects: _Expected = None) -> models.AdapterStatus:
    """Keep an adapter in host memory and in a slot."""
    async with _changing(lifecycle):
        await lifecycle.pin(lora_name, expects=expects)
    return _status(lifecycle, lora_name, "pinned")


@router.post("/{lora_name:path}/unpin")
async def unpin(lora_name: models.Name, lifecycle: _Lifecycle) -> models.AdapterStatus:
    """Let a pinned adapter be evicted like any other."""
    async with _changing(lifecycle):
        await lifecycle.unpin(lora_name)
    return _status(lifecycle, lora_name, "unpinned")


@router.post("/{lora_name:path}/pause")
async def pause(
    lora_name: models.Name,
    lifecycle: _Lifecycle,
    mode: Annotated[
        PauseMode, Query(description="whether requests that came before end, are aborted, or go on after the resume")
    ] = PauseMode.WAIT,
) -> models.AdapterStatus:
    """Hold new requests for a name until a resume; the answer comes once none runs. Other names run on."""
    if await lifecycle.server.pause(lora_name, mode):
        return _status(lifecycle, lora_name, "paused")
    return _status(lifecycle, lora_name, "was resumed before its requests had ended", "resumed")


@router.post("/{lora_name:path}/resume")
async def resume(lora_name: models.Name, lifecycle: _Lifecycle) -> models.AdapterStatus:
    """Let held requests of a paused name go on."""
    was_paused = await lifecycle.server.resume(lora_name)
    return _status(lifecycle, lora_name, "resumed" if was_paused else "was not paused")


@router.post("/{lora_name:path}/refresh")
async def refresh(
    lora_name: models.Name, lifecycle: _Lifecycle, body: models.SwapRequest | None = None, expects: _Expected = None
) -> models.VersionStatus:
    """Look for a new version at the source now, and swap to it; ends the effect of a rollback."""
    body = body or models.SwapRequest()
    async with _changing(lifecycle) as began:
        change = await lifecycle.refresh(lora_name, expects=expects, moves=body.moves)
    return _version_status(lifecycle, lora_name, _REFRESHED[change.reason], change, began)


@router.post("/{lora_name:path}/rollback")
async def rollback(
    lora_name: models.Name,
    lifecycle: _Lifecycle,
    pushes: _Pushes,
    body: models.RollbackRequest | None = None,
    expects: _Expected = None,
) -> models.VersionStatus:
    """Go back to the version before, or to a kept version, and stay there until the next refresh or push."""
    body, principal = body or models.RollbackRequest(), _caller()
    async with _changing(lifecycle) as began:
        # The digests of the answer come with the change itself: another call may change the name meanwhile.
        change = await lifecycle.roll_back(
            lora_name,
            body.digest,
            expects=expects,
            moves=body.moves,
            of_any_name=not principal.is_pusher,
            admit=partial(pushes.admitted, lora_name, share_of_request(), principal.owns),
        )
    return _version_status(lifecycle, lora_name, f"rolled back to {(change.after or '')[:12]}", change, began)


def _caller() -> Principal:
    """The caller as the access policy knows the caller; one without any right of a pusher where no policy decides."""
    return principal_of_request.get() or Principal("")


@asynccontextmanager
async def _changing(lifecycle: Lifecycle) -> AsyncIterator[float]:
    """End only once what is served is written down: a kill forgets no answered change; yields the start of the call."""
    yield time.perf_counter()
    await lifecycle.written()


async def _chat_view(path: str, lifecycle: Lifecycle) -> models.ChatView | None:
    chat = await lifecycle.server.resolver.chats.read(path)
    if chat == Chat():
        return None
    return models.ChatView(
        template=bool(chat.templates),
        special_tokens=dict(chat.special_tokens),
        end_token=chat.special_tokens.get("eos_token"),
        end_ids=list(chat.end_ids),
        added_tokens={token.text: token.id for token in chat.added_tokens},
        lost_tokens={token.text: token.id for token in chat.lost_tokens},
        unused=list(chat.unused),
    )


def _version_status(
    lifecycle: Lifecycle, name: str, done: str, change: VersionChange, began: float
) -> models.VersionStatus:
    return models.VersionStatus(
        **_status(lifecycle, name, done).model_dump(),
        digest=change.after,
        previous_digest=change.before,
        swapped=change.is_swap,
        elapsed_ms=_ms(time.perf_counter() - began),
    )


def _status(lifecycle: Lifecycle, name: str, what: str, status: str = "success") -> models.AdapterStatus:
    message = f"LoRA adapter '{name}' {what}."
    lora_id = lifecycle.registry.adapter_id(name)
    return models.AdapterStatus(status=status, message=message, lora_name=name, lora_id=lora_id)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
