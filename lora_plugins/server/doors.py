"""Every door of vLLM's API server through which a request with an adapter goes, with the gate before it.

The vLLM symbols that are wrapped stand in the ledger in `lora_plugins.engine`.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from lora_plugins.engine import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.process import EVENTS, settings_of_server
from lora_plugins.server.changes import Changes
from lora_plugins.server.gate import Gate
from lora_plugins.server.of_vllm import changes_of
from lora_plugins.server.served import Served, blocked, no_longer_served
from lora_plugins.server.staging import Rpc

_gates: weakref.WeakKeyDictionary[Any, Gate] = weakref.WeakKeyDictionary()

# vLLM swallows what `add_lora` raises; whoever wants its text puts a list here before calling.
_refusals: ContextVar[list[LoRAPluginsError] | None] = ContextVar("lora_plugins_refusals", default=None)


# The names of the server whose endpoint loads in place: `add_lora` is told of its engine only.
_loads_in_place: ContextVar[Changes | None] = ContextVar("lora_plugins_loads_in_place", default=None)

# vLLM's unload waits for the name's lock before it looks; whoever wants to know what it takes out puts a list here.
_leaving: ContextVar[list[Served | None] | None] = ContextVar("lora_plugins_leaving", default=None)


def put_gate() -> None:
    """Have every request that names an adapter wait at the gate before it enters the engine."""
    _before_the_engine()
    _before_streaming()
    _knowing_what_loads_in_place()
    _with_the_text_of_refusals()
    _with_what_is_blocked()
    _freeing_what_is_unloaded()


def changes(models: Any) -> Changes:
    """The changes to what this `OpenAIServingModels` serves."""
    client = models.engine_client
    return changes_of(models, gate_of(client), _rpc_of(weakref.ref(client)))


def gate_of(client: Any) -> Gate:
    """The gate before this engine client, made at the first use."""
    gate = _gates.get(client)
    if gate is None:
        slots = client.vllm_config.lora_config.max_loras
        gate = _gates[client] = Gate(_rpc_of(weakref.ref(client)), slots=slots, events=EVENTS)
    return gate


def _rpc_of(client: weakref.ref[Any]) -> Rpc:
    """Call a method of every worker; with data parallelism, of every engine's."""

    async def call(method: str, arguments: tuple[Any, ...]) -> list[Any]:
        target = client()
        if target is None:
            return []
        of_each = await answers_by_engine(target, method, arguments)
        return [answer for answers in of_each.values() for answer in answers]

    return call


async def answers_by_engine(client: Any, method: str, arguments: tuple[Any, ...]) -> dict[int, list[Any]]:
    """Call a method of every worker of every engine; the answers of an engine's workers by its number."""
    core = client.engine_core
    engines = getattr(core, "core_engines", None) or []
    numbers = [int.from_bytes(identity, "little") for identity in engines] or [0]
    if len(engines) < 2:
        return {numbers[0]: list(await client.collective_rpc(method, args=arguments))}
    # `collective_rpc` would ask all engines and return the first one's answers only.
    of_each = await asyncio.gather(
        *(core._call_utility_async("collective_rpc", method, None, arguments, None, engine=e) for e in engines)  # noqa: SLF001 - in the ledger
    )
    return {number: list(answers) for number, answers in zip(numbers, of_each, strict=True)}


@asynccontextmanager
async def _held(client: Any, lora_request: Any, request_id: Any = "", *, load: bool = False) -> AsyncIterator[None]:
    """Inside, the request's adapter is staged and leased; a request without one passes."""
    if lora_request is None:
        yield
        return
    gate = gate_of(client)
    try:
        hold = await gate.enter(lora_request, str(request_id), load=load)
    except LoRAPluginsError as error:
        raise _noted(error) from None
    try:
        yield
    finally:
        gate.leave(hold)


def _noted(error: LoRAPluginsError) -> Exception:
    _note(error)
    return http_error(error)


def _note(error: LoRAPluginsError) -> None:
    refusals = _refusals.get()
    if refusals is not None:
        refusals.append(error)


def _before_the_engine() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    add_lora, generate, encode = AsyncLLM.add_lora, AsyncLLM.generate, AsyncLLM.encode

    @functools.wraps(add_lora)
    async def gated_add_lora(self: Any, lora_request: Any) -> Any:
        if lora_request.load_inplace:
            known = _loads_in_place.get()
            if known is None:  # not from the endpoint, so there are no names to swap; vLLM's own way
                return await add_lora(self, lora_request)
            try:
                if await known.take_in_place(lora_request):
                    return True
            except LoRAPluginsError as error:
                raise _noted(error) from None
        async with _held(self, lora_request, load=True):
            return True  # staged on every worker; a step that needs it flips its slot

    @functools.wraps(generate)
    async def gated_generate(
        self: Any,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        **kwargs: Any,
    ) -> Any:
        async with _held(self, lora_request, request_id):
            async for output in generate(
                self, prompt, sampling_params, request_id, lora_request=lora_request, **kwargs
            ):
                yield output

    @functools.wraps(encode)
    async def gated_encode(
        self: Any,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        async with _held(self, lora_request, request_id):
            async for output in encode(self, prompt, pooling_params, request_id, lora_request, *args, **kwargs):
                yield output

    AsyncLLM.add_lora = gated_add_lora
    AsyncLLM.generate = gated_generate
    AsyncLLM.encode = gated_encode


def _before_streaming() -> None:
    """A stream's status is sent before the engine is asked, so an adapter that cannot be staged is found out before."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    check_model = BaseServing._check_model  # noqa: SLF001 - in the ledger

    @functools.wraps(check_model)
    async def checked(self: Any, request: Any) -> Any:
        refused = await check_model(self, request)
        lora_request = self.models.lora_requests.get(request.model) if request.model else None
        if refused is None and lora_request is not None and getattr(request, "stream", False):
            try:
                await gate_of(self.models.engine_client).admit(lora_request)
            except LoRAPluginsError as error:
                raise http_error(error) from None
        return refused

    BaseServing._check_model = checked  # noqa: SLF001


def _knowing_what_loads_in_place() -> None:
    """`load_inplace` changes weights in the engine loop, under what runs; with this, it is a swap like any other."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    load_lora_adapter = OpenAIServingModels.load_lora_adapter

    @functools.wraps(load_lora_adapter)
    async def loaded(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.load_inplace:
            return await load_lora_adapter(self, request, *args, **kwargs)
        known = changes(self)
        token = _loads_in_place.set(known)
        try:
            result = await load_lora_adapter(self, request, *args, **kwargs)
        finally:
            _loads_in_place.reset(token)
        known.changed()
        return result

    OpenAIServingModels.load_lora_adapter = loaded


def _with_the_text_of_refusals() -> None:
    """Where `add_lora` raises, vLLM answers "could not be loaded" or a 500; here it is our status and text."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    for name in ("resolve_lora", "load_lora_adapter"):
        setattr(OpenAIServingModels, name, _explaining(getattr(OpenAIServingModels, name)))


def _explaining(method: Any) -> Any:
    @functools.wraps(method)
    async def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        refusals: list[LoRAPluginsError] = []
        token = _refusals.set(refusals)
        try:
            result = await method(self, *args, **kwargs)
        finally:
            _refusals.reset(token)
        if refusals and hasattr(result, "error"):  # an ErrorResponse
            raise http_error(refusals[-1]) from None
        return result

    return explained


def _with_what_is_blocked() -> None:
    """A name that was unloaded and blocked is not resolved anew, and whatever is resolved is known to the catalogue."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    resolve_lora = OpenAIServingModels.resolve_lora

    @functools.wraps(resolve_lora)
    async def resolved(self: Any, lora_name: str) -> Any:
        known = changes(self)
        if lora_name in known.catalogue.blocked:
            raise http_error(blocked(lora_name))
        result = await resolve_lora(self, lora_name)
        if hasattr(result, "error"):
            try:
                served = await known.load_version(lora_name)
            except LoRAPluginsError as error:
                raise http_error(error) from None
            return result if served is None else served.request
        known.changed()
        return result

    OpenAIServingModels.resolve_lora = resolved


def _freeing_what_is_unloaded() -> None:
    """The unload endpoint takes the name out of vLLM's table only; with this, its slot, memory and lease are freed."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    unload_lora_adapter = OpenAIServingModels.unload_lora_adapter
    check_unload = OpenAIServingModels._check_unload_lora_adapter_request  # noqa: SLF001 - in the ledger

    @functools.wraps(check_unload)
    async def checked(self: Any, request: Any) -> Any:
        refused = await check_unload(self, request)
        leaving = _leaving.get()
        if refused is None and leaving is not None:  # only here is it the one that vLLM is about to take out
            leaving.append(changes(self).catalogue.get(request.lora_name))
        return refused

    @functools.wraps(unload_lora_adapter)
    async def unloaded(self: Any, request: Any) -> Any:
        known = changes(self)
        leaving: list[Served | None] = []
        token = _leaving.set(leaving)
        try:
            result = await unload_lora_adapter(self, request)
        finally:
            _leaving.reset(token)
        served = leaving[-1] if leaving else None
        if served is not None and not hasattr(result, "error"):
            known.changed()
            if not await known.free(served, settings_of_server().drain_timeout_s, no_longer_served(served.name)):
                return f"{result} Requests that still run keep its memory until they end."
        return result

    OpenAIServingModels._check_unload_lora_adapter_request = checked  # noqa: SLF001
    OpenAIServingModels.unload_lora_adapter = unloaded
