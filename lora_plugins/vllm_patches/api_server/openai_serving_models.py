"""vLLM's table of served models: our lifecycle sees what vLLM resolves, loads and unloads, and frees the adapters.

Wrapped are methods of `OpenAIServingModels` (vllm/entrypoints/openai/models/serving.py, 0.30 to 0.33), each once. Loads
reach the planner by the engine client: vLLM's code runs over a copy of the table with ours in the client's place.

Loads run in the background where a name is resolved, and a failed load is answered with our status and text. What lies
at a path is copied into the store and served as any version; a load in place becomes a swap.

Touches:
    vllm.entrypoints.openai.models.serving:
        OpenAIServingModels{engine_client, lora_resolvers, init_static_loras(self), resolve_lora(self, lora_name),
            __init__(self, engine_client, base_model_paths, lora_modules),
            load_lora_adapter(self, request, base_model_name)}
    vllm.entrypoints.serve.lora.protocol: LoadLoRAAdapterRequest{load_inplace}
    vllm.entrypoints.serve.engine.protocol: ErrorResponse{error} ErrorInfo{code}
Why: vLLM drops the text of the error (load_lora_adapter: and answers 500), and it loads in place in the engine's loop,
    under what runs; files at a path may change or go. It says the same of every unknown name.
Until: vLLM passes on the text of what add_lora and resolvers raise, and loads in place in the background.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Any

from lora_plugins.adapter.names import misspelt, why_absent, with_base_name
from lora_plugins.api.access.principals import require_admin, share_of_request
from lora_plugins.api.http_errors import as_http, http_error
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.process import moves_running, this_process
from lora_plugins.resolvers.sources.uri import place_by_path
from lora_plugins.server.background import background
from lora_plugins.server.follower import Follower
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.limits import NO_LIMIT
from lora_plugins.server.response import is_for_request
from lora_plugins.vllm_patches.api_server.adapter_chats import know_tokenizer
from lora_plugins.vllm_patches.api_server.async_llm import is_planned, planner_of, snapshots_of
from lora_plugins.vllm_patches.api_server.base_serving import default_adapters, may_use, near_names
from lora_plugins.vllm_patches.api_server.lifecycle import lifecycle_of
from lora_plugins.vllm_patches.api_server.lora_resolver import begin_serving, end_with_engine
from lora_plugins.vllm_patches.api_server.model_card import card_of
from lora_plugins.vllm_patches.api_server.roles import listen, resolved_by_leader, take_role
from lora_plugins.vllm_patches.api_server.serve_command import require_in_force
from lora_plugins.vllm_patches.wrapping import Over, wrap
from lora_plugins.worker.lora_request import is_vllms


def patch() -> None:
    """Wrap the table of every API server of this process; a second call changes nothing."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    for name, wrapper in WRAPPERS.items():
        wrap(OpenAIServingModels, name, wrapper)


def _making(original: Any) -> Any:
    """Begin to serve when vLLM has its base model; an error here fails the startup."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        process = this_process()
        # Before vLLM's own start: without the policy of the settings, nothing may be served.
        if process.is_resolver_registered:
            require_in_force(process)
        original(self, *args, **kwargs)
        if process.is_resolver_registered:
            process.tables.add(self)
            know_tokenizer(self.engine_client.renderer, self.engine_client.model_config)
            begin_serving(self, process)

    return made


def _starting(original: Any) -> Any:
    """Share vLLM's table among several API servers before the table has a name; `--lora-modules` are the leader's."""

    async def init_static_loras(self: Any) -> None:
        role, process = await take_role(self), this_process()
        if process.is_resolver_registered:
            background(end_with_engine(weakref.ref(self.engine_client), process))
        if isinstance(role, Follower):
            return
        await original(self)
        if role is not None:
            await listen(self, role)

    return init_static_loras


class _Client(Over):
    """The engine client for vLLM's table of models while vLLM adds an adapter: loads are ours."""

    def __init__(self, models: Any, lifecycle: Lifecycle) -> None:
        super().__init__(models.engine_client)
        self._lifecycle = lifecycle

    def in_place_of(self, models: Any) -> Any:
        """Return a copy of the table, over the same adapters, that asks this client."""
        asking = copy.copy(models)
        asking.engine_client = self
        return asking


class _LoadsByPath(_Client):
    """Serves the files at a path as a version.

    Attributes:
        error: why the adapter cannot be served; vLLM keeps the text only.
        seen_block: the name's block as the load was asked for, see `block_to_end`.
    """

    error: LoRAPluginsError | None = None
    seen_block: str | None = None

    async def add_lora(self, request: Any) -> bool:
        """Load as vLLM does; vLLM puts the request into its table afterwards.

        An operator's call ends the name's block; at the start (`--lora-modules`) nobody has asked for an end.
        """
        moves, name = moves_running(), request.lora_name
        try:
            async with self._lifecycle.ending_block(name, self.seen_block) if is_for_request() else nullcontext():
                if not await self._lifecycle.load_by_path(request, moves=moves):  # only workers may find the files
                    await planner_of(self._under).load(request, wants_slot=False)
        except LoRAPluginsError as error:
            self.error = error
            raise
        return True


class _LoadsInBackground(_Client):
    """Answers before the load: the resolved request waits for the load in the scheduler."""

    async def add_lora(self, request: Any) -> bool:
        """Load as vLLM does; a load that fails takes the adapter out of the table again."""
        if not is_vllms(request):  # it may hold weights, which only vLLM's own call brings to the workers
            return bool(await self._under.add_lora(request))
        async with snapshots_of(self._under).adding(request) as taken:
            uri = None if taken is request else place_by_path(request.lora_path)
            load = planner_of(self._under).load(taken, uri=uri)
        # An error raised here would not reach the caller: vLLM logs it and asks the next resolver (`except
        # BaseException` in `resolve_lora`, 0.32).
        background(self._loading(load, request))
        return True

    async def _loading(self, load: Coroutine[Any, Any, None], request: Any) -> None:
        try:
            await load
        except LoRAPluginsError:  # the adapter's request is answered with the error
            self._lifecycle.load_failed(request)


def _loading_by_path(original: Any) -> Any:
    """Load by path, and answer errors with our status; vLLM answers 500 where `add_lora` raises.

    vLLM serves the files at the path whenever vLLM reads them; ours serves the files of the load. `load_inplace`
    changes weights under running requests; with ours, the call is a swap like any other, unless the settings say so.
    """

    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        await require_admin()
        if not is_planned(self.engine_client):
            return await original(self, request, *args, **kwargs)
        lifecycle = lifecycle_of(self)
        client = _LoadsByPath(self, lifecycle)
        if is_for_request():
            with as_http():
                client.seen_block = lifecycle.block_to_end(request.lora_name)
        result = await original(client.in_place_of(self), request, *args, **kwargs)
        if client.error is not None:
            raise http_error(client.error, shows_paths=True)  # the caller has named the path
        # vLLM's own checks return an ErrorResponse.
        if not hasattr(result, "error"):
            await lifecycle.written()
        return result

    return load_lora_adapter


def _resolving(original: Any) -> Any:
    """Resolve, and answer a name that no resolver has with the name's fault, where the name itself shows the fault.

    vLLM says "does not exist" of every such name. Our resolver does not raise: another resolver may have other names.
    A default adapter that was unloaded comes back by an operator's call alone: a source's would answer for everybody.
    """

    async def resolve_lora(self: Any, lora_name: str) -> Any:
        role = this_process().role
        with as_http():
            if lora_name in default_adapters(self):
                asked = copy.copy(self)
                asked.lora_resolvers = []
                result = await original(asked, lora_name)
            elif isinstance(role, Follower):
                result = await resolved_by_leader(role, lora_name)
            elif is_planned(self.engine_client):
                result = await _resolved(original, self, lora_name)
            else:
                result = await original(self, lora_name)
        error = getattr(result, "error", None)  # an attribute of an ErrorResponse
        if error is not None and error.code == AdapterNotFound.http_status and this_process().is_resolver_registered:
            base_names = [path.name for path in self.base_model_paths]
            reason = with_base_name(lora_name, base_names) or why_absent(lora_name)
            reason = reason or misspelt(lora_name, near_names(self, lora_name))
            if reason is not None:
                raise http_error(reason)
        return result

    return resolve_lora


async def _resolved(original: Any, models: Any, lora_name: str) -> Any:
    """Resolve, unless the name is blocked, and write the result down for the next start.

    Requests for one name share an answer: behind vLLM's lock for the name each request would wait for its own turn.
    """
    lifecycle, share = lifecycle_of(models), share_of_request()

    async def resolve() -> Any:
        # A shallow copy shares `lora_requests` and `lora_resolver_lock`: vLLM's code writes the table itself.
        result = await original(_LoadsInBackground(models, lifecycle).in_place_of(models), lora_name)
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


def _unloading(original: Any) -> Any:
    """Unload by our lifecycle, which frees slot, memory and lease once nothing uses them; for administrators only.

    Touches:
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{unload_lora_adapter(self, request), _check_unload_lora_adapter_request(self, request)}
    Why: vLLM's unload takes the name out of its table only, and SageMaker has other routes to it.
    Until: vLLM frees what it unloads, and asks a plugin who may.
    """

    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        await require_admin()
        if not is_planned(self.engine_client):
            return await original(self, request)
        lifecycle, name = lifecycle_of(self), request.lora_name
        async with self.lora_resolver_lock[name]:  # as vLLM: a resolve under way puts its name into the table first
            error = await self._check_unload_lora_adapter_request(request)
        if error is not None:
            return error
        with as_http():
            await lifecycle.remove(name)
        background(lifecycle.written())  # a trainer does not wait for the disk, as in vLLM
        return f"Success: LoRA adapter '{name}' removed successfully."  # vLLM's words

    return unload_lora_adapter


def _listing(original: Any) -> Any:
    """List the adapters that the caller may use; `root` is the operator's path, not the copy's.

    A version by its digest is listed by its name alone.

    Touches:
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{is_base_model(self, model_name), show_available_models(self)}
        vllm.entrypoints.serve.engine.protocol: ModelList{data} ModelCard{id, root, parent, max_model_len}
    Why: an adapter that the key may not use must look like one that does not exist; vLLM knows no cold adapter.
    Until: vLLM asks a plugin which adapters a request may use.
    """

    async def show_available_models(self: Any) -> Any:
        listed = await original(self)
        if self.lora_requests and is_planned(self.engine_client):
            registry = lifecycle_of(self).registry
            # Another server of the store may have blocked a name that is still in this server's table.
            blocked = registry.blocked.among(card.id for card in listed.data)
            listed.data = [card for card in listed.data if card.id not in blocked]
            for card in listed.data:
                adapter = registry.get(card.id)
                card.root = card.root if adapter is None else adapter.given_path or card.root
            listed.data = [card for card in listed.data if not ((it := registry.get(card.id)) and it.is_by_digest)]
        listed.data = [card for card in listed.data if self.is_base_model(card.id) or may_use(card.id)]
        await _add_cold(self, listed.data)
        for card in listed.data:
            card.max_model_len = self.model_config.max_model_len
        return listed

    return show_available_models


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


WRAPPERS = {
    "__init__": _making,
    "init_static_loras": _starting,
    "load_lora_adapter": _loading_by_path,
    "resolve_lora": _resolving,
    "unload_lora_adapter": _unloading,
    "show_available_models": _listing,
}
