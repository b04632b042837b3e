"""vLLM's asynchronous engine client: its loads go to the planner, and its requests get copies of adapters, and errors.

Runs in an API server, and in programs that use `AsyncLLM`. Wrapped are `AsyncLLM.add_lora`, `remove_lora`, `generate`
and `encode` (vllm/v1/engine/async_llm.py, 0.30 to 0.33). A `LoRARequest` names a path, whose files may change or go:
the files are copied into the store (a snapshot), and the engine gets the request with the copy's path. The planner of
every engine loads the adapter (`scheduler/state.py` has the planner's words). The error that ended a request is raised
as an `HTTPException` with our status and text.

Where the API server has a lifecycle, it has put its copies of served adapters on the client (`COPIES`): a copy that is
damaged or missing is then fetched again, and the request goes on.

Touches:
    vllm.v1.engine.async_llm: AsyncLLM{engine_core, vllm_config, errored, dead_error}
    vllm.lora.request: LoRARequest{lora_int_id, lora_path, load_inplace}
Why: an error is answered with our status and text, and no request waits for a load in the engine's loop; prefix-cache
    keys hold (name, path), and files may change or go.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from lora_plugins.adapter.fit import without_lora
from lora_plugins.api.access.principals import share_of_request
from lora_plugins.api.http_errors import as_http, http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import NotServed, RequestServed
from lora_plugins.lifecycle.planner_client import Ask, PlannerClient
from lora_plugins.lifecycle.response import Response, present, together
from lora_plugins.lifecycle.snapshots import Snapshots, only_engines_have
from lora_plugins.process import this_process
from lora_plugins.resolvers.sources.uri import place_by_path
from lora_plugins.vllm_patches.engine_core.request import is_in_store
from lora_plugins.vllm_patches.message_fields import VERSIONS, error_of_output
from lora_plugins.vllm_patches.wrapping import ours, signature_of, wrap
from lora_plugins.worker.request_types import is_inplace, is_vllms

# Attributes of a client: the copies of adapters that its API server serves, its snapshots, and its planners.
COPIES, _SNAPSHOTS, _PLANNER = "lora_plugins_copies", "lora_plugins_snapshots", "lora_plugins_planner"
_DEATH_IS_SEEN_S = 1.0  # how long after an engine's death a waiting call sees it, at most


def patch() -> None:
    """Wrap every client of this process."""
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(AsyncLLM, "add_lora", _add_lora, only=has_planner)
    wrap(AsyncLLM, "remove_lora", remove_lora)
    wrap(AsyncLLM, "generate", _answer)
    wrap(AsyncLLM, "encode", _answer)


def planner_of(client: Any) -> PlannerClient:
    """Return the planners behind an engine client; the same object every time.

    With several engines, a private method of vLLM's client asks each of them.

    Touches:
        vllm.v1.engine.core_client:
            AsyncMPClient{call_utility_async(self, method, *args), _call_utility_async(self, method, *args, engine)}
            MPClient{core_engines}
    Why: with data parallelism, call_utility_async returns the first engine's answer only.
    Until: call_utility_async returns every engine's answers.
    """
    process = this_process()
    # A strong reference back would keep a client until the next collection of garbage.
    return ours(client, _PLANNER, lambda: PlannerClient(_asking(weakref.ref(client)), process.events, process.size_of))


def snapshots_of(client: Any) -> Snapshots:
    """Return the adapters that callers of an engine client have named by a path; the same object every time.

    Raises:
        InvalidSettings: the store cannot be made.
    """

    def made() -> Snapshots:
        base_path, ref = client.vllm_config.model_config.model, weakref.ref(client)  # weak: as in `planner_of`
        snapshots = Snapshots(this_process().resolver, is_vllms, base_path, lambda: _held(ref()))
        # Copies hold leases in the store: release them with the client.
        weakref.finalize(client, snapshots.forget_all)
        return snapshots

    return ours(client, _SNAPSHOTS, made)


def known_snapshots(client: Any) -> Snapshots | None:
    """Return what `snapshots_of` has made; None where no caller has named an adapter by a path yet."""
    found: Snapshots | None = vars(client).get(_SNAPSHOTS)
    return found


async def _held(client: Any) -> Any:
    """Return the ids of adapters that the engines of a client have.

    Touches:
        vllm.v1.engine.async_llm: AsyncLLM{list_loras(self)}
        vllm.v1.engine.llm_engine: LLMEngine{list_loras(self)}
    Why: requests name ids of adapters that only workers have, with paths that mean nothing.
    """
    listed = client.list_loras()
    return (await _unless_dead(client, asyncio.gather(*[listed])))[0] if inspect.isawaitable(listed) else listed


def lora_config_of(client: Any) -> Any:
    """Return vLLM's LoRAConfig, or None; an engine client that is not vLLM's own may have no configuration."""
    return getattr(getattr(client, "vllm_config", None), "lora_config", None)


def has_planner(client: Any) -> bool:
    """Return whether the engines of a client have planners: LoRA is on."""
    return lora_config_of(client) is not None


def is_planned(client: Any) -> bool:
    """Return whether our scheduler plans this engine's adapters: the manager is named, and LoRA is on."""
    return this_process().is_manager_patched and has_planner(client)


def _asking(client: weakref.ref[Any]) -> Ask:
    # `ask` returns each engine's answer, by the engine's number.
    async def ask(utility: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        """Call a utility of every engine: vLLM's own call returns the first engine's answer only."""
        target = client()
        if target is None:
            raise RuntimeError("the engine client is gone")
        if not has_planner(target):
            return _without_lora(utility)
        # vLLM's ids of engines are their ranks, little-endian (vllm/v1/engine/core_client.py, 0.30 to 0.33).
        core = target.engine_core
        engines = getattr(core, "core_engines", None) or []
        numbers = [int.from_bytes(identity, "little") for identity in engines] or [0]
        # The public call, as long as it asks every engine: a client in the caller's process has no other.
        if len(engines) < 2:
            calls = [core.call_utility_async(utility, *arguments)]
        else:
            calls = [core._call_utility_async(utility, *arguments, engine=engine) for engine in engines]  # noqa: SLF001
        return dict(zip(numbers, await _unless_dead(target, asyncio.gather(*calls)), strict=True))

    return ask


def _without_lora(utility: str) -> dict[int, Any]:
    """Answer for a server without LoRA, whose engines have no planners: no figures, and an error for any other call."""
    if utility in {"lora_plugins_residency", "lora_plugins_figures"}:
        return {}
    raise without_lora()


async def _unless_dead(client: Any, answers: asyncio.Future[list[Any]]) -> list[Any]:
    """Return the engines' answers.

    If an engine dies meanwhile, vLLM never ends the call. The caller's request would keep the API server from ending.

    Raises:
        EngineDeadError: an engine has died.
    """
    try:
        while not (await asyncio.wait([answers], timeout=_DEATH_IS_SEEN_S))[0]:
            if client.errored:
                raise client.dead_error
        return answers.result()
    finally:
        # Calls to a dead engine never end by themselves.
        answers.cancel()
        # `gather` keeps a cancellation as an exception, which asyncio logs with a traceback unless somebody reads it.
        answers.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _add_lora(original: Any, self: Any, lora_request: Any) -> Any:
    """Have every planner load a copy of the adapter; a request without a directory goes to vLLM's own method."""
    with as_http():
        async with snapshots_of(self).adding(lora_request) as taken:
            # `taken` is the request with the copy's path, or `lora_request` itself where nothing was copied.
            if taken is lora_request and (is_inplace(taken) or not is_vllms(taken)):  # no directory
                return await original(self, taken)
            if taken is not lora_request and only_engines_have(taken):  # loaded already, from no directory
                return True
            # Workers on other nodes fetch a copy in the store from where the caller's path is.
            uri = place_by_path(lora_request.lora_path) if is_in_store(taken.lora_path) else None
            await planner_of(self).load(taken, uri=uri, wants_slot=False)
    return True


def remove_lora(original: Any, self: Any, lora_id: int) -> Any:
    """Forget the copy of an id: an adapter that comes under the id later is read again, as by vLLM."""
    if (snapshots := known_snapshots(self)) is not None:
        snapshots.forget(lora_id)
    return original(self, lora_id)


def _answer(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate or encode: give the request the path of the adapter's copy; raise the error that an output carries.

    Calls for the base model go to vLLM unchanged.

    Touches:
        vllm.v1.engine.async_llm:
            AsyncLLM{generate(self, prompt, sampling_params, request_id, prompt_text, lora_request, ...),
                encode(self, prompt, pooling_params, request_id, lora_request, ...)}
    Why: a request whose adapter cannot be loaded is answered with our status and text.
    """
    call = signature_of(original).bind(*args, **kwargs)
    if call.arguments.get("lora_request") is None:
        return original(*args, **kwargs)
    return _watched(original, call)


async def _watched(original: Any, call: inspect.BoundArguments) -> AsyncIterator[Any]:
    """Yield the outputs of a request for an adapter; raise where the engine could not have the adapter."""
    process, client, lora_request = this_process(), call.args[0], call.arguments["lora_request"]
    name, response, has_begun = lora_request.lora_name, present(), False
    if has_planner(client):
        try:
            lora_request = call.arguments["lora_request"] = await snapshots_of(client).of(lora_request)
        except LoRAPluginsError as refusal:
            response.error = http_error(refusal)
            raise response.error from None
    copies, share = getattr(client, COPIES, None), share_of_request()
    may_fetch_again = True  # once for a request: a damaged or missing copy
    while True:  # twice at most
        taken = None
        try:
            async with nullcontext(lora_request) if copies is None else copies.using(lora_request, share) as taken:
                call.arguments["lora_request"] = taken
                # At the begin: `last_used_at` and the order of eviction say when an adapter was asked for, not when an
                # answer ended.
                planner_of(client).used(taken)
                await process.resolver.chats.read(taken.lora_path)  # later steps of vLLM's cannot await
                async for output in original(*call.args, **call.kwargs):
                    if (error := error_of_output(output)) is not None:
                        raise error
                    _note_spans(response, output, None if has_begun else taken.lora_path)
                    if not has_begun:
                        has_begun = response.has_begun = True
                        process.events.emit(RequestServed(name))
                    yield output
                return
        except LoRAPluginsError as error:
            # Fetch again only a copy that this request has used (`taken`), and only before its first output: an answer
            # that has begun cannot begin again.
            if copies is not None and may_fetch_again and taken is not None and not has_begun:
                may_fetch_again = False
                if (again := await copies.after_failure(taken, error)) is not None:
                    lora_request = again
                    continue  # with the copy that was fetched again
            process.events.emit(NotServed("request", name, error))
            snapshots_of(client).refused(taken or lora_request, error)
            response.error = http_error(error)
            raise response.error from None


def _note_spans(response: Response, output: Any, path: str | None) -> None:
    """Note the versions that an output names; if it names none, the version at `path`, None after the first output."""
    spans = (getattr(output, "kv_transfer_params", None) or {}).get(VERSIONS)
    if spans is None and path is not None and is_in_store(path):
        spans = [(os.path.basename(path), 0)]
    if spans is not None:
        response.spans = together(response.spans, spans)
