"""vLLM's table of served models: what is resolved, loaded and unloaded by it is known to us, and freed.

Wrapped are methods of `OpenAIServingModels` (vllm/entrypoints/openai/models/serving.py, 0.30 to 0.33), and
`BaseServing._maybe_get_adapters`, through which every request that names an adapter goes.
"""

from __future__ import annotations

import functools
from typing import Any

from lora_plugins.api.access.principals import share_of_request
from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.process import moves_running
from lora_plugins.server.registry import blocked, no_longer_served
from lora_plugins.server.response_start import HoldResponseStart, pending
from lora_plugins.vllm_patches.api_server.async_llm import AddLora, adding, has_planner
from lora_plugins.vllm_patches.api_server.lifecycle import lifecycle_of


def patch() -> None:
    """Have every API server of this process do so; the innermost wrapper first."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.entrypoints.serve.instrumentator import metrics

    models = OpenAIServingModels
    models.load_lora_adapter = _loading(models.load_lora_adapter)
    models.resolve_lora = _resolving(models.resolve_lora)
    models._check_unload_lora_adapter_request = _checking_unload(models._check_unload_lora_adapter_request)  # noqa: SLF001
    models.unload_lora_adapter = _unloading(models.unload_lora_adapter)
    models.show_available_models = _listing(models.show_available_models)
    BaseServing._maybe_get_adapters = _holding(BaseServing._maybe_get_adapters)  # noqa: SLF001
    metrics.attach_router = _with_middleware(metrics.attach_router)


def _loading(original: Any) -> Any:
    """Where `add_lora` raises, vLLM answers a 500 with its text; with this it is our status.

    vLLM serves whatever lies at the path when it is read; with this, what lay there when it was loaded. `load_inplace`
    changes weights under what runs; with this, it is a swap like any other, unless the settings say so.
    """

    @functools.wraps(original)
    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_planner(self.engine_client):
            return await original(self, request, *args, **kwargs)
        lifecycle = lifecycle_of(self)
        with adding(AddLora(by_path=functools.partial(lifecycle.load_by_path, moves=moves_running()))) as call:
            result = await original(self, request, *args, **kwargs)
        if call.error is not None:
            raise http_error(call.error, shows_paths=True)  # the caller has named the path
        if not hasattr(result, "error"):
            lifecycle.on_change()
        return result

    return load_lora_adapter


def _resolving(original: Any) -> Any:
    """A blocked name is not resolved again, and whatever is resolved is written down for the next start.

    The request that is resolved here waits in the scheduler: nobody need wait for the load before.
    """

    @functools.wraps(original)
    async def resolve_lora(self: Any, lora_name: str) -> Any:
        if not has_planner(self.engine_client):
            return await original(self, lora_name)
        lifecycle = lifecycle_of(self)
        if lora_name in lifecycle.registry.blocked:
            raise http_error(blocked(lora_name))
        try:
            async with lifecycle.copies.shares.using(share_of_request(), lora_name):
                with adding(AddLora(on_failure=lifecycle.load_failed)):
                    result = await original(self, lora_name)
                if hasattr(result, "error"):  # an ErrorResponse
                    adapter = await lifecycle.load_version(lora_name)
                    return result if adapter is None else adapter.request
        except LoRAPluginsError as error:
            raise http_error(error) from None
        lifecycle.on_change()
        return result

    return resolve_lora


def _checking_unload(original: Any) -> Any:
    """Under the name's lock, vLLM checks what it then takes out of its table: here the registry still sees it."""

    @functools.wraps(original)
    async def _check_unload_lora_adapter_request(self: Any, request: Any) -> Any:
        if has_planner(self.engine_client):
            lifecycle_of(self).registry.get(request.lora_name)
        return await original(self, request)

    return _check_unload_lora_adapter_request


def _unloading(original: Any) -> Any:
    """The endpoint takes the name out of vLLM's table only; with this, its slot, memory and lease are freed."""

    @functools.wraps(original)
    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        if not has_planner(self.engine_client):
            return await original(self, request)
        lifecycle, name = lifecycle_of(self), request.lora_name
        result = await original(self, request)
        adapter = None if hasattr(result, "error") else lifecycle.registry.forget(name)
        if adapter is not None:
            lifecycle.on_change()
            if not await lifecycle.drain(adapter, no_longer_served(name)):
                return f"{result} Requests that still run keep its memory until they end."
        return result

    return unload_lora_adapter


def _listing(original: Any) -> Any:
    """`root` says where the operator has it, not where its copy is."""

    @functools.wraps(original)
    async def show_available_models(self: Any) -> Any:
        listed = await original(self)
        if self.lora_requests and has_planner(self.engine_client):
            registry = lifecycle_of(self).registry
            for card in listed.data:
                adapter = registry.get(card.id)
                card.root = card.root if adapter is None else adapter.given_path or card.root
        return listed

    return show_available_models


def _holding(original: Any) -> Any:
    """The response to a request for an adapter begins when the engine has begun to answer.

    A name that vLLM has checked, and that is unloaded before this looks it up again, is one to ask for once more.
    """
    from vllm.exceptions import VLLMNotFoundError

    @functools.wraps(original)
    def _maybe_get_adapters(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = original(self, request, *args, **kwargs)
        except VLLMNotFoundError:
            if not has_planner(self.models.engine_client):
                raise
            is_blocked = request.model in lifecycle_of(self.models).registry.blocked
            raise http_error((blocked if is_blocked else no_longer_served)(request.model)) from None
        if found is not None and getattr(request, "stream", False):
            pending().is_held = True
        return found

    return _maybe_get_adapters


def _with_middleware(original: Any) -> Any:
    @functools.wraps(original)
    def attach_router(app: Any) -> None:
        original(app)
        app.add_middleware(HoldResponseStart, answer=_answer)

    return attach_router


async def _answer(scope: Any, error: Exception) -> Any:
    """The response that the application's own handler makes of an exception."""
    from starlette.requests import Request

    handlers = scope["app"].exception_handlers
    handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    return await handler(Request(scope), error)


LEDGER = (
    Patch(
        """
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels.resolve_lora(self, lora_name)
            OpenAIServingModels.load_lora_adapter(self, request, base_model_name)
            OpenAIServingModels.show_available_models(self)
        vllm.entrypoints.serve.lora.protocol:
            LoadLoRAAdapterRequest{load_inplace}
        """,
        what="wrapped: an adapter that cannot be loaded is answered with our status and text; what lies at a path is "
        "copied into the store and served as any version, and listed with the path; a load in place becomes a swap",
        why="vLLM drops the text of the error (load_lora_adapter: and answers 500), and it loads in place in the "
        "engine's loop, under what runs; files at a path may change or go",
        remove="vLLM passes on the text of what add_lora raises, and loads in place in the background",
    ),
    Patch(
        """
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels.unload_lora_adapter(self, request)
            OpenAIServingModels._check_unload_lora_adapter_request(self, request)
        """,
        what="wrapped: unload waits for running requests and frees slot, host memory and lease; the check notes, under "
        "the name's lock, which version is unloaded",
        why="vLLM's unload takes the name out of its table only",
        remove="vLLM frees what it unloads",
    ),
    Patch(
        """
        vllm.entrypoints.serve.engine.serving:
            BaseServing._maybe_get_adapters(self, request, supports_default_mm_loras)
            BaseServing{models}
        vllm.exceptions:
            VLLMNotFoundError
        vllm.entrypoints.serve.instrumentator.metrics:
            attach_router(app)
        """,
        what="wrapped: a streamed response for an adapter begins when the engine has begun to answer; attach_router "
        "adds the middleware for it. The 404 for a name that was there a moment ago is a 503",
        why="vLLM sends status 200 before it knows whether the adapter can be loaded, and looks a name up twice, "
        "between which it may be unloaded",
        remove="vLLM begins a streamed response with the engine's first output",
    ),
)
