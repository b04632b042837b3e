"""The role of this process among several API servers: the leader, which changes the served adapters, or a follower.

`take_role` runs at the start of each API server, while vLLM's table of names is empty. `several_api_servers.py` has
given all servers one folder, and vLLM's engine client knows the server's number: number 0 leads. Then followers have a
copy of the leader's table, and call the leader over a socket in the folder (`lifecycle/leader.py`,
`lifecycle/follower.py`): `_listen` answers their calls, `resolved_by_leader` makes one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from lora_plugins.adapter.chat import Chat
from lora_plugins.api.access.policy import Principal
from lora_plugins.api.access.principals import principal_of_request
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.carrying import answer_carried
from lora_plugins.lifecycle.follower import Follower, end_without_leader
from lora_plugins.lifecycle.leader import Frame, Leader
from lora_plugins.lifecycle.principal_limits import FollowedRates, Rate, Share
from lora_plugins.process import Process
from lora_plugins.vllm_patches.api_server.async_llm import has_planner
from lora_plugins.vllm_patches.api_server.server_lifecycle import lifecycle_of
from lora_plugins.vllm_patches.api_server.several_api_servers import refuse_several, that_changes
from lora_plugins.worker.request_types import is_vllms

# vLLM's load of an API server that accepts no connection (`_NOT_ACCEPTING` in entrypoints/launchers/launcher.py, 0.32).
_NOT_ACCEPTING = 2**31 - 1


async def take_role(models: Any, process: Process, serve_static: Callable[[], Awaitable[None]]) -> None:
    """Lead, or follow: vLLM's table of names in `models` is shared from here on. A single server stays as it is.

    `models.lora_requests` is replaced: in the leader by a table whose changes followers get, in a follower by a copy of
    the table. A leader and a single server call `serve_static`, which serves the adapters of the command line.

    Touches:
        vllm.v1.engine.core_client: AsyncMPClient{client_count, client_index}
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{lora_requests, engine_client, resolve_lora(self, lora_name)}
        vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path, base_model_name}
        vllm.v1.engine.async_llm: AsyncLLM{engine_core, abort(self, request_id, internal)}
    Why: each of several API servers of vLLM has a table of its own, and engine ids that others give too.
    Until: API servers share what they serve.

    Raises:
        InvalidSettings: several servers do not know of each other, and may change the served adapters.
    """
    core: Any = getattr(models.engine_client, "engine_core", None)
    count, folder = getattr(core, "client_count", 1), process.folder
    # `changes` names a setting by which served adapters may change; without a folder, the servers cannot agree.
    if folder is None and (changes := that_changes(process.settings)) is not None:
        refuse_several(count, changes)
    if count < 2 or folder is None or not has_planner(models.engine_client):
        await serve_static()
        return
    # vLLM numbers the API servers of a command from 0, each with its own engine client.
    if core.client_index == 0:
        process.role = leader = _leader(models, process)
        await serve_static()
        await _listen(models, process, leader, folder)
        return
    process.role = follower = _follower(models, process)
    # Before the connection: the leader's first message fills the table.
    models.lora_requests = follower.table
    process.rates = FollowedRates(follower)

    async def chat_of_leader(path: str) -> Chat:
        return msgspec.convert((await follower.call("chat", path=path))["chat"], Chat)

    process.resolver.chats.of_leader = chat_of_leader
    await follower.connect(folder, core.client_index)


async def _listen(models: Any, process: Process, leader: Leader, folder: Path) -> None:
    """Accept followers, and answer the calls that `FollowedCopies`, `FollowedRates` and others make in them."""

    async def call(frame: Frame, held: AsyncExitStack) -> Frame:
        match frame["call"]:
            case "use":
                # Until the follower ends the call, which closes `held`, the copy stays in the store.
                share = Share(**frame["share"])
                await held.enter_async_context(lifecycle_of(models).copies.sharing(share, frame["name"]))
            case "resolve":
                return await _resolve(models, leader, frame)
            case "have":
                return {"is_had": await lifecycle_of(models).copies.have(frame["name"], frame["engine_id"])}
            case "chat":
                return {"chat": await process.resolver.chats.read(frame["path"])}
            case "used":
                lifecycle_of(models).planner.used_at[frame["engine_id"]] = time.time()
            case "admit":
                return {"wait": process.rates.wait(Rate(**frame["rate"]))}
            case "spend":
                process.rates.spend(Rate(**frame["rate"]), frame["tokens"])
            case unknown:
                raise KeyError(unknown)
        return {}

    await leader.listen(folder, call, partial(answer_carried, process.app))


async def resolved_by_leader(follower: Follower, name: str) -> Any:
    """Return or raise as vLLM's `resolve_lora` does in the leader: a `LoRARequest` of the name, or an error response.

    Touches: vllm.entrypoints.serve.engine.protocol: ErrorResponse{error}
    Why: a client shall see the same, whichever API server the client has asked.
    Until: API servers share what they serve.

    Raises:
        LoRAPluginsError: the leader's refusal. SourceUnavailable: the leader is gone.
        HTTPException, VLLMClientError: what another package's resolver has raised in the leader.
    """
    principal = principal_of_request.get()
    who = None if principal is None else [principal.label, principal.share]
    answer = await follower.call("resolve", name=name, who=who)
    if "raises" in answer:
        raise _exception_of(*answer["raises"])
    if "error" in answer:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        return ErrorResponse(**answer["error"])
    return _request_of(answer["adapter"])


def _leader(models: Any, process: Process) -> Leader:
    # A request of another class may hold weights, and cannot cross to a follower: None.
    def plain_of(request: Any) -> Frame | None:
        if not is_vllms(request):
            return None
        digest = process.resolver.store.digest_at(request.lora_path)
        warnings = [] if digest is None else process.resolver.known.warnings_of(digest)
        return {"request": msgspec.to_builtins(request), "warnings": warnings}

    def gone(number: int) -> None:
        _count_no_more(models.engine_client, process.app, number)
        background(lifecycle_of(models).planner.end_api_server(number))

    leader = Leader(plain_of, gone)
    leader.table.update(models.lora_requests)
    models.lora_requests = leader.table
    return leader


def _follower(models: Any, process: Process) -> Follower:
    def request_of(adapter: Frame) -> Any:
        request = _request_of(adapter)
        digest = process.resolver.store.digest_at(request.lora_path)
        if digest is not None:
            process.resolver.known.note_warnings(digest, adapter["warnings"])
        return request

    def changed(name: str, before: Any) -> None:
        copies: Any = lifecycle_of(models).copies  # `FollowedCopies`, as this process follows
        copies.changed(name, before)

    def abort(request_ids: list[str]) -> None:
        background(models.engine_client.abort(request_ids, internal=True))

    async def relieve() -> None:
        await lifecycle_of(models).copies.relieve()

    def lost() -> None:
        background(end_without_leader(lambda: _is_ending(process.app)))

    return Follower(request_of, changed, abort, relieve, on_loss=lost)


def _count_no_more(client: Any, app: Any, number: int) -> None:
    """Have living API servers count nothing of a dead one, whose numbers would stay in vLLM's shared memory.

    The load of the dead server becomes `_NOT_ACCEPTING`, and its count of queued requests 0. Releases without these
    numbers are left alone.

    Touches:
        vllm.entrypoints.launchers.launcher: NoSignalServer{peer_loads} # since 0.32
        vllm.v1.engine.async_llm: AsyncLLM{admission_stats}
        vllm.v1.engine.admission_control: SharedAdmissionStats{_counters, COUNTERS_PER_SLOT}
    Why: the least loaded API server accepts, and --max-num-queued-reqs counts the requests of all.
    Until: vLLM goes on without a dead API server, or starts another in its place.
    """
    loads = getattr(getattr(app.state, "server", None), "peer_loads", None)
    if loads is not None:
        loads[0][number] = _NOT_ACCEPTING
    stats = getattr(client, "admission_stats", None)
    if stats is not None:
        stats._counters[number * stats.COUNTERS_PER_SLOT] = 0  # noqa: SLF001


def _is_ending(app: Any) -> bool:
    """Return whether vLLM has begun to shut this API server down; `app.state.server` is uvicorn's server."""
    return bool(getattr(getattr(app.state, "server", None), "should_exit", False))


def _request_of(adapter: Frame) -> Any:
    from vllm.lora.request import LoRARequest

    return msgspec.convert(adapter["request"], LoRARequest)


# --- calls of a follower to the leader ---


async def _resolve(models: Any, leader: Leader, frame: Frame) -> Frame:
    """Resolve a name for a follower; the answer has an adapter, an error response, or an exception to raise there."""
    if frame["who"] is not None:  # each call has a context of its own
        label, share = frame["who"]
        # The follower has authenticated the request; only the label and the share decide here.
        principal_of_request.set(Principal(label, share=share))
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    try:
        result = await models.resolve_lora(frame["name"])
    except (HTTPException, VLLMClientError) as error:
        if isinstance(error.__context__, LoRAPluginsError):  # crosses whole, for `as_http` in the follower
            raise error.__context__ from None
        if isinstance(error, HTTPException):
            return {"raises": [error.status_code, str(error.detail), dict(error.headers or {})]}
        status = HTTPStatus.NOT_FOUND if isinstance(error, VLLMNotFoundError) else HTTPStatus.BAD_REQUEST
        return {"raises": [int(status), str(error), {}]}
    if hasattr(result, "error"):
        return {"error": result.model_dump(mode="json")}
    return {"adapter": leader.plain_of(result)}


def _exception_of(status: int, text: str, headers: dict[str, str]) -> Exception:
    """Return an exception that vLLM answers with this status and text, as the leader's exception would be."""
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    if status == HTTPStatus.NOT_FOUND:
        return VLLMNotFoundError(text)  # type: ignore[no-any-return]
    if status == HTTPStatus.BAD_REQUEST:
        return VLLMClientError(text)  # type: ignore[no-any-return]
    return HTTPException(status, text, headers)
