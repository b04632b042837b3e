"""vLLM's table of served models: our lifecycle sees what vLLM resolves, loads and unloads, and frees the adapters.

Runs in an API server. Wrapped are methods of `OpenAIServingModels` (vllm/entrypoints/openai/models/serving.py, 0.30 to
0.33): its start, `resolve_lora` for a request's unknown name, the operator's `/v1/load_lora_adapter` and
`/v1/unload_lora_adapter`, and `/v1/models`. Where `lora_lru_manager` is named and LoRA is on, the lifecycle
(`lifecycle/lifecycle.py`) answers; else vLLM's own method does.

Our sources are asked before the resolvers of other packages, whose answers vLLM's own code loads. A name's adapter is
loaded in the background, and a failed load is answered with our status and text. An adapter at a path is copied into
the store and served as any version; a load in place becomes a swap.

Touches:
    vllm.entrypoints.openai.models.serving:
        OpenAIServingModels{engine_client, lora_resolvers, init_static_loras(self), resolve_lora(self, lora_name),
            __init__(self, engine_client, base_model_paths, lora_modules),
            load_lora_adapter(self, request, base_model_name), _check_load_lora_adapter_request(self, request)}
    vllm.entrypoints.serve.engine.protocol: ErrorResponse{error} ErrorInfo{code}
Why: vLLM drops the text of the error (load_lora_adapter: and answers 500), and it loads in place in the engine's loop,
    under what runs; files at a path may change or go. It says the same of every unknown name.
Until: vLLM passes on the text of what add_lora and resolvers raise, and loads in place in the background.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

from lora_plugins.adapter.mixture import canonical
from lora_plugins.adapter.names import misspelt, why_absent, with_base_name
from lora_plugins.api.access.principals import require_admin, share_of_request
from lora_plugins.api.http_errors import as_http
from lora_plugins.errors import AdapterNotFound
from lora_plugins.lifecycle.background_tasks import background
from lora_plugins.lifecycle.follower import Follower
from lora_plugins.lifecycle.lifecycle import Lifecycle
from lora_plugins.lifecycle.principal_limits import NO_LIMIT
from lora_plugins.lifecycle.response import is_for_request
from lora_plugins.lifecycle.unloading import block_to_end, ending_block
from lora_plugins.process import moves_running, this_process
from lora_plugins.vllm_patches.api_server.adapter_chats import know_tokenizer
from lora_plugins.vllm_patches.api_server.async_llm import is_planned
from lora_plugins.vllm_patches.api_server.base_serving import default_adapters, may_use, near_names
from lora_plugins.vllm_patches.api_server.lora_resolver import LoRAPluginsResolver, begin_serving, end_with_engine
from lora_plugins.vllm_patches.api_server.model_card import card_of
from lora_plugins.vllm_patches.api_server.roles import resolved_by_leader, take_role
from lora_plugins.vllm_patches.api_server.serve_command import require_in_force
from lora_plugins.vllm_patches.api_server.server_lifecycle import planned_lifecycle
from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Wrap the table of every API server of this process; a second call changes nothing."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    wrap(OpenAIServingModels, "__init__", _init_models)
    wrap(OpenAIServingModels, "init_static_loras", _init_static_loras)
    wrap(OpenAIServingModels, "load_lora_adapter", _load_lora_adapter)
    wrap(OpenAIServingModels, "resolve_lora", _resolve_lora)
    wrap(OpenAIServingModels, "unload_lora_adapter", _unload_lora_adapter)
    wrap(OpenAIServingModels, "show_available_models", _show_available_models)


def _init_models(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Begin to serve when vLLM has its base model; an error here fails the startup."""
    process = this_process()
    # Before vLLM's own start: without the policy of the settings, nothing may be served.
    require_in_force(process)
    original(self, *args, **kwargs)
    if process.is_resolver_registered:
        process.models = weakref.ref(self)  # a server in this process, with its engine, ends before the process
        know_tokenizer(process.resolver.chats, self.engine_client.renderer, self.engine_client.model_config)
        begin_serving(self, process)
    if is_planned(self.engine_client):  # our sources are asked by the lifecycle
        self.lora_resolvers = [it for it in self.lora_resolvers if not isinstance(it, LoRAPluginsResolver)]


async def _init_static_loras(original: Any, self: Any) -> None:
    """Share vLLM's table among several API servers before the table has a name; `--lora-modules` are the leader's."""
    process = this_process()
    background(end_with_engine(weakref.ref(self.engine_client), process))
    await take_role(self, process, partial(original, self))


async def _load_lora_adapter(original: Any, self: Any, request: Any, base_model_name: str | None = None) -> Any:
    """Load by path, and answer errors with our status; vLLM answers 500 where `add_lora` raises.

    vLLM serves the files at the path whenever vLLM reads them; ours serves the files of the load. `load_inplace`
    changes weights under running requests; with ours, the call is a swap like any other, unless the settings say so.
    """
    await require_admin()
    lifecycle, name = planned_lifecycle(self), request.lora_name
    if lifecycle is None:
        return await original(self, request, base_model_name)
    with as_http(shows_paths=True):  # the caller has named the path
        # An operator's call ends the name's block; at the start (`--lora-modules`) nobody has asked for an end.
        server = lifecycle.server
        ending = ending_block(server, name, block_to_end(server, name)) if is_for_request() else nullcontext()
        async with self.lora_resolver_lock[name]:
            if (error := await self._check_load_lora_adapter_request(request)) is not None:
                return error
            async with ending:
                base = base_model_name if base_model_name and self.is_base_model(base_model_name) else None
                await lifecycle.load_by_path(name, request.lora_path, base, moves=moves_running())
    background(lifecycle.written())  # a trainer does not wait for the disk, as in vLLM
    return f"Success: LoRA adapter '{name}' added successfully."  # vLLM's words


async def _resolve_lora(original: Any, self: Any, lora_name: str) -> Any:
    """Resolve, and answer a name that no resolver has with the name's fault, where the name itself shows the fault.

    vLLM says "does not exist" of every such name. A default adapter that was unloaded comes back by an operator's call
    alone: a source's would answer for everybody.
    """
    process, lora_name = this_process(), canonical(lora_name)
    with as_http():
        if lora_name in default_adapters(self):
            asked = copy.copy(self)
            asked.lora_resolvers = []
            result = await original(asked, lora_name)
        elif isinstance(process.role, Follower):
            result = await resolved_by_leader(process.role, lora_name)
        elif (lifecycle := planned_lifecycle(self)) is None:
            result = await original(self, lora_name)
        else:
            result = await _resolved(original, self, lifecycle, lora_name)
        error = getattr(result, "error", None)  # an attribute of an ErrorResponse
        if error is not None and error.code == AdapterNotFound.http_status:
            base_names = [path.name for path in self.base_model_paths]
            reason = with_base_name(lora_name, base_names) or why_absent(lora_name)
            if (reason := reason or misspelt(lora_name, near_names(self, lora_name))) is not None:
                raise reason
    return result


async def _resolved(original: Any, models: Any, lifecycle: Lifecycle, lora_name: str) -> Any:
    """Resolve, unless the name is blocked, and write the result down for the next start.

    Requests for one name share an answer: behind vLLM's lock for the name each request would wait for its own turn.
    """
    share = share_of_request()

    async def resolve() -> Any:
        if (request := await lifecycle.resolve(lora_name)) is not None:
            return request
        result = await original(models, lora_name)  # of other packages' resolvers
        if hasattr(result, "error"):
            adapter = await lifecycle.load_version(lora_name)
            return result if adapter is None else adapter.request
        lifecycle.server.on_change()
        return result

    lifecycle.registry.blocked.refuse(lora_name)
    if share.is_limit and not await this_process().resolver.has(lora_name, lifecycle.server.vllm.base_path):
        share = NO_LIMIT  # a name that no source has takes nothing of the share
    async with lifecycle.copies.sharing(share, lora_name):
        return await lifecycle.resolving.run(lora_name, resolve)


async def _unload_lora_adapter(original: Any, self: Any, request: Any) -> Any:
    """Unload by our lifecycle, which frees slot, memory and lease once nothing uses them; for administrators only.

    Touches:
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{unload_lora_adapter(self, request), _check_unload_lora_adapter_request(self, request)}
    Why: vLLM's unload takes the name out of its table only, and SageMaker has other routes to it.
    Until: vLLM frees what it unloads, and asks a plugin who may.
    """
    await require_admin()
    lifecycle, name = planned_lifecycle(self), request.lora_name
    if lifecycle is None:
        return await original(self, request)
    async with self.lora_resolver_lock[name]:  # as vLLM: a resolve under way puts its name into the table first
        error = await self._check_unload_lora_adapter_request(request)
    if error is not None:
        return error
    with as_http():
        await lifecycle.remove(name)
    background(lifecycle.written())  # a trainer does not wait for the disk, as in vLLM
    return f"Success: LoRA adapter '{name}' removed successfully."  # vLLM's words


async def _show_available_models(original: Any, self: Any) -> Any:
    """List the adapters that the caller may use; `root` is the operator's path, not the copy's.

    A version by its digest is listed by its name alone.

    Touches:
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{is_base_model(self, model_name), show_available_models(self)}
        vllm.entrypoints.serve.engine.protocol: ModelList{data} ModelCard{id, root, parent, max_model_len}
    Why: an adapter that the key may not use must look like one that does not exist; vLLM knows no cold adapter.
    Until: vLLM asks a plugin which adapters a request may use.
    """
    listed = await original(self)
    if self.lora_requests and (lifecycle := planned_lifecycle(self)) is not None:
        # Another server of the store may have blocked a name that is still in this server's table.
        hidden = lifecycle.registry.blocked.among(card.id for card in listed.data)
        for card in listed.data:
            if (adapter := lifecycle.registry.get(card.id)) is not None:
                card.root = adapter.given_path or card.root
                if adapter.is_by_digest:
                    hidden.add(card.id)
        listed.data = [card for card in listed.data if card.id not in hidden]
    listed.data = [card for card in listed.data if self.is_base_model(card.id) or may_use(card.id)]
    await _add_cold(self, listed.data)
    for card in listed.data:
        card.max_model_len = self.model_config.max_model_len
    return listed


async def _add_cold(models: Any, cards: list[Any]) -> None:
    """Add adapters that sources list and nobody has asked for, where the settings say so, as the base model's."""
    process = this_process()
    settings, base = process.settings, next((card for card in cards if models.is_base_model(card.id)), None)
    if base is None or settings.list_models != "all" or not settings.runtime_lora_updating:
        return
    hidden = {card.id for card in cards} | process.refused.names()
    names = await process.listed_names.names(
        models.model_config.model,
        lambda name: name not in hidden and not models.is_base_model(name) and may_use(name),
    )
    blocked = process.resolver.store.blocks.among(names)
    cards += (card_of(base, name) for name in names if name not in blocked)
