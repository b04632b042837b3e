"""vLLM's table of served models: what is resolved, loaded and unloaded by it is known to us, and freed.

Wrapped are methods of `OpenAIServingModels` (vllm/entrypoints/openai/models/serving.py, 0.30 to 0.33), and
`BaseServing._maybe_get_adapters`, through which every request that names an adapter goes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.process import settings_of_server
from lora_plugins.server.lifecycle import Changes
from lora_plugins.server.registry import Served, blocked, no_longer_served
from lora_plugins.server.response_start import HoldResponseStart, pending
from lora_plugins.vllm_patches.async_llm import has_planner, load_in_place, on_failed_load, planner_of, refusals
from lora_plugins.vllm_patches.lifecycle import changes_of

# vLLM's unload waits for the name's lock before it looks; whoever wants to know what it takes out puts a list here.
_leaving: ContextVar[list[Served | None] | None] = ContextVar("lora_plugins_leaving", default=None)


def patch() -> None:
    """Have every API server of this process do so; the innermost wrapper first."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.entrypoints.serve.instrumentator import metrics

    models = OpenAIServingModels
    models.load_lora_adapter = _explaining(_loading(models.load_lora_adapter))
    models.resolve_lora = _knowing(_explaining(_without_waiting(models.resolve_lora)))
    models._check_unload_lora_adapter_request = _checking(models._check_unload_lora_adapter_request)  # noqa: SLF001
    models.unload_lora_adapter = _freeing(models.unload_lora_adapter)
    BaseServing._maybe_get_adapters = _holding(BaseServing._maybe_get_adapters)  # noqa: SLF001
    metrics.attach_router = _with_middleware(metrics.attach_router)


def changes(models: Any) -> Changes:
    """The changes to what this `OpenAIServingModels` serves."""
    return changes_of(models, planner_of(models.engine_client))


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """What a wrapper below vLLM's own code is to know of the one above it."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _explaining(method: Any) -> Any:
    """Where `add_lora` raises, vLLM answers "could not be loaded" or a 500; here it is our status and text."""

    @functools.wraps(method)
    async def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        found: list[LoRAPluginsError] = []
        with _set(refusals, found):
            result = await method(self, *args, **kwargs)
        if found and hasattr(result, "error"):  # an ErrorResponse
            raise http_error(found[-1]) from None
        return result

    return explained


def _loading(original: Any) -> Any:
    """`load_inplace` changes weights under what runs; with this, it is a swap like any other."""

    @functools.wraps(original)
    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.load_inplace or not has_planner(self.engine_client):
            return await original(self, request, *args, **kwargs)
        known = changes(self)
        with _set(load_in_place, known.take_in_place):
            result = await original(self, request, *args, **kwargs)
        known.changed()
        return result

    return load_lora_adapter


def _without_waiting(original: Any) -> Any:
    """The request that is resolved here waits in the scheduler: nobody need wait for the load before."""

    @functools.wraps(original)
    async def resolve_lora(self: Any, lora_name: str) -> Any:
        def failed(lora_request: Any) -> None:
            changes(self).not_loaded(lora_request)  # else it would be listed, and refused at every request

        with _set(on_failed_load, failed):
            return await original(self, lora_name)

    return resolve_lora


def _knowing(original: Any) -> Any:
    """A name that was unloaded and blocked is not resolved again, and whatever is resolved is known to the registry."""

    @functools.wraps(original)
    async def resolve_lora(self: Any, lora_name: str) -> Any:
        if not has_planner(self.engine_client):
            return await original(self, lora_name)
        known = changes(self)
        if lora_name in known.catalogue.blocked:
            raise http_error(blocked(lora_name))
        result = await original(self, lora_name)
        if hasattr(result, "error"):
            try:
                served = await known.load_version(lora_name)
            except LoRAPluginsError as error:
                raise http_error(error) from None
            return result if served is None else served.request
        known.changed()
        return result

    return resolve_lora


def _checking(original: Any) -> Any:
    @functools.wraps(original)
    async def check(self: Any, request: Any) -> Any:
        refused = await original(self, request)
        leaving = _leaving.get()
        if refused is None and leaving is not None:  # only here is it the one that vLLM is about to take out
            leaving.append(changes(self).catalogue.get(request.lora_name))
        return refused

    return check


def _freeing(original: Any) -> Any:
    """The endpoint takes the name out of vLLM's table only; with this, its slot, memory and lease are freed."""

    @functools.wraps(original)
    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        if not has_planner(self.engine_client):
            return await original(self, request)
        known = changes(self)
        leaving: list[Served | None] = []
        with _set(_leaving, leaving):
            result = await original(self, request)
        served = leaving[-1] if leaving else None
        if served is not None and not hasattr(result, "error"):
            known.changed()
            if not await known.free(served, settings_of_server().drain_timeout_s, no_longer_served(served.name)):
                return f"{result} Requests that still run keep its memory until they end."
        return result

    return unload_lora_adapter


def _holding(original: Any) -> Any:
    """The response to a request for an adapter begins when the engine has begun to answer."""

    @functools.wraps(original)
    def _maybe_get_adapters(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
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
        vllm.entrypoints.serve.lora.protocol:
            LoadLoRAAdapterRequest{load_inplace}
        """,
        what="wrapped: an adapter that cannot be loaded is answered with our status and text, and a load in place "
        "becomes a swap",
        why="vLLM drops the text of the error (load_lora_adapter: and answers 500), and it loads in place in the "
        "engine's loop, under what runs",
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
        vllm.entrypoints.serve.instrumentator.metrics:
            attach_router(app)
        """,
        what="wrapped: a streamed response for an adapter begins when the engine has begun to answer; attach_router "
        "adds the middleware for it",
        why="vLLM sends status 200 before it knows whether the adapter can be loaded",
        remove="vLLM begins a streamed response with the engine's first output",
    ),
)
