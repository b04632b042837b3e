"""What every part of this package needs of vLLM: its plugins' names, its resolvers, its answers.

VLLM is imported inside functions. The vLLM symbols that are touched stand in `lora_plugins.ledger`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from lora_plugins.errors import AdapterNotFound, LoRAPluginsError

# --- vLLM's plugins ---

_builtins: dict[tuple[str, str], Callable[[], None]] = {}


def take_over(module_name: str, function_name: str, register: Callable[[], None]) -> None:
    """Put `register` in the place of vLLM's builtin of the same entry-point name.

    vLLM imports both entry points and keeps the one that it discovered last. If that is the builtin, it is read
    from its module after this has run; if it is ours, nothing else is needed. So ours runs in either order.
    """
    _builtins[module_name, function_name] = builtin(module_name, function_name)
    setattr(importlib.import_module(module_name), function_name, register)


def builtin(module_name: str, function_name: str) -> Callable[[], None]:
    """The function of vLLM behind an entry point, taken over or not."""
    known = _builtins.get((module_name, function_name))
    if known is not None:
        return known
    return getattr(importlib.import_module(module_name), function_name)  # type: ignore[no-any-return]


# --- vLLM's resolvers ---


def register_resolver(name: str, resolver: Any) -> None:
    """Have vLLM ask `resolver`, whose class has a `resolve_lora`, for unknown model names."""
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    LoRAResolver.register(type(resolver))
    LoRAResolverRegistry.register_resolver(name, resolver)


def lora_request(name: str, lora_id: int, path: str, base_model_name: str | None) -> Any:
    """VLLM's `LoRARequest`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=path, base_model_name=base_model_name)


def when_serving(before: Callable[[], None], after: Callable[[Any], None]) -> None:
    """Call `before` and `after` around the making of each `OpenAIServingModels`; what they raise ends the start."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    original = OpenAIServingModels.__init__

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        before()
        original(self, *args, **kwargs)
        after(self)

    OpenAIServingModels.__init__ = wrapped


# --- vLLM's answers ---


def http_error(error: LoRAPluginsError) -> Exception:
    """The exception that makes vLLM answer with our status and text (the one place where errors meet HTTP)."""
    from fastapi import HTTPException
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    if isinstance(error, AdapterNotFound):
        return VLLMNotFoundError(str(error))  # type: ignore[no-any-return]
    if error.http_status == 400:
        return VLLMClientError(str(error))  # type: ignore[no-any-return]
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return HTTPException(error.http_status, str(error), headers)


def keep_http_headers() -> None:
    """Have vLLM put an `HTTPException`'s headers on its response."""
    from vllm.entrypoints.serve.exception_handling import register as module

    original = module.http_exception_handler

    @functools.wraps(original)
    async def wrapped(req: Any, exc: Any) -> Any:
        response = await original(req, exc)
        for name, value in (exc.headers or {}).items():
            response.headers[name] = value
        return response

    module.http_exception_handler = wrapped


# --- vLLM's kernels ---


def cpu_kernels_mix_up_base_rows() -> bool:
    """Whether vLLM's own kernels run on the CPU and compute base-model rows with an adapter."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.platforms import current_platform

    # 0.33 masks index -1, which stands for "no adapter"; before, it selects the last slot.
    return bool(current_platform.is_cpu()) and "-1" not in inspect.getsource(lora_ops.bgmv_shrink)
