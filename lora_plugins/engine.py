"""Every vLLM symbol that this package touches, as a ledger (`SEAMS`), and the code that touches it.

No other module imports vLLM. vLLM is imported inside the functions, so that reading the ledger needs no vLLM:
`tools/check_seams.py` holds it against any vLLM's sources, and a test holds it against the installed one.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lora_plugins.base_model import BaseModel
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.events import Events
from lora_plugins.logs import LogEvents, logger
from lora_plugins.resolvers.chain import ResolvedAdapter, SourceChain
from lora_plugins.resolvers.source import Source
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.served_model import describe_base
from lora_plugins.settings import Settings
from lora_plugins.store.opening import open_store

REGISTRY_NAME = "lora-plugins"


@dataclass(frozen=True, slots=True)
class Seam:
    """One touched symbol of vLLM.

    Attributes:
        symbol: `module:qualified.name`.
        has: what must be there: parameter names of a function, in order; attribute or field names of a class.
        what: what we do with it. why: what for. since: the first vLLM version with it in this form that we support.
        remove: what would have to change upstream for this entry to go.
    """

    symbol: str
    has: tuple[str, ...]
    what: str
    why: str
    since: str
    remove: str


SEAMS: tuple[Seam, ...] = (
    Seam(
        symbol="vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver",
        has=(),
        what="replaced by our function of the same entry-point name, when VLLM_PLUGINS names it",
        why="vLLM ships an entry point of this name; load_plugins_by_group keeps the last discovered one",
        since="0.30",
        remove="vLLM lets a user choose among entry points of one name",
    ),
    Seam(
        symbol="vllm.plugins.lora_resolvers.hf_hub_resolver:register_hf_hub_resolver",
        has=(),
        what="replaced by our function of the same entry-point name, when VLLM_PLUGINS names it",
        why="as for register_filesystem_resolver",
        since="0.30",
        remove="vLLM lets a user choose among entry points of one name",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__",
        has=("self", "engine_client", "base_model_paths", "lora_modules"),
        what="wrapped: after it has run, its engine client and served names are read, and its attribute "
        "lora_resolver_lock is replaced",
        why="resolve_lora is told the model's path only; names, largest rank and shapes hang on these two. "
        "lora_resolver_lock keeps a lock for every name that was ever asked for",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration, and unused locks are dropped",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.exception_handling.register:http_exception_handler",
        has=(),
        what="wrapped: headers of the HTTPException are put on the response",
        why="vLLM drops them, and with them Retry-After on a 503",
        since="0.30",
        remove="vLLM's handler passes exc.headers on, as FastAPI's own does",
    ),
    Seam(
        symbol="vllm.entrypoints.serve.exception_handling.handlers.http:http_exception_handler",
        has=("req", "exc"),
        what="called from the wrapper",
        why="as above",
        since="0.30",
        remove="as above",
    ),
    Seam(
        symbol="vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
        has=("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling"),
        what="its source is read, to warn where it does not mask index -1",
        why="on the CPU, vLLM before 0.33 computes base-model rows with the last slot's adapter",
        since="0.30",
        remove="0.32 is no longer supported",
    ),
    Seam(
        symbol="vllm.platforms.interface:Platform.is_cpu",
        has=("self",),
        what="called",
        why="the warning above is for the CPU only",
        since="0.30",
        remove="0.32 is no longer supported",
    ),
    Seam(
        symbol="vllm.lora.resolver:LoRAResolver.resolve_lora",
        has=("self", "base_model_name", "lora_name"),
        what="implemented by our resolver",
        why="vLLM asks it for unknown model names",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.lora.resolver:_LoRAResolverRegistry.register_resolver",
        has=("self", "resolver_name", "resolver"),
        what="called once per process",
        why="public interface",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        has=("engine_client", "model_config", "base_model_paths"),
        what="read, with engine_client.vllm_config.lora_config",
        why="names, configuration and LoRA limits of the served model",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration",
    ),
    Seam(
        symbol="vllm.config.lora:LoRAConfig",
        has=("max_lora_rank",),
        what="read",
        why="a larger rank is refused before the engine sees it",
        since="0.30",
        remove="LoRAResolver is handed the model and LoRA configuration",
    ),
    Seam(
        symbol="vllm.lora.request:LoRARequest",
        has=("lora_name", "lora_int_id", "lora_path", "base_model_name"),
        what="built for each resolved adapter",
        why="public interface",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.exceptions:VLLMNotFoundError",
        has=(),
        what="raised for L002",
        why="becomes a 404 with our text",
        since="0.30",
        remove="never: this is the public interface",
    ),
    Seam(
        symbol="vllm.exceptions:VLLMClientError",
        has=(),
        what="raised for L003 and L005",
        why="becomes a 400 with our text",
        since="0.30",
        remove="never: this is the public interface",
    ),
)


class LoRAPluginsResolver:
    """What vLLM asks for an unknown model name; all our sources stand behind this one resolver.

    Duck-typed after `vllm.lora.resolver.LoRAResolver`, of which it is registered as a virtual subclass. It is made in
    every process of vLLM, so threads and store are made at the first use, which only the API server comes to.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._make_sources: list[Callable[[Executor], Source]] = []

    def add(self, make_source: Callable[[Executor], Source]) -> None:
        """Ask this source too; it is made at the first use."""
        self._make_sources.append(make_source)

    @functools.cached_property
    def chain(self) -> SourceChain:
        """The sources behind this resolver.

        Raises:
            InvalidSettings: the store cannot be made.
        """
        executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="lora-plugins")
        chain = SourceChain(self.settings, Events(LogEvents()), open_store(self.settings), executor=executor)
        for make_source in self._make_sources:
            chain.add(make_source(executor))
        return chain

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return a `LoRARequest`, or None where no source has the adapter; errors carry their HTTP status."""
        try:
            resolved = await self.chain.resolve(lora_name, base_model_name)
        except LoRAPluginsError as error:
            raise http_error(error) from None  # the event has been logged
        return None if resolved is None else _lora_request(resolved, self.chain.base)


def _lora_request(resolved: ResolvedAdapter, base: BaseModel | None) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name=resolved.name,
        lora_int_id=resolved.lora_id,  # vLLM's server puts its own counter here
        lora_path=str(resolved.path),
        base_model_name=base.served_names[0] if base and base.served_names else None,
    )


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


_resolver: LoRAPluginsResolver | None = None


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


def serve_from(make_source: Callable[[Executor], Source], settings: Settings) -> None:
    """Have vLLM ask this source too; called again for a source of the same label, it changes nothing."""
    global _resolver
    AllowedUris.parse(settings.allowed_uris)  # a prefix that cannot be right ends the start
    if _resolver is None:
        _resolver = LoRAPluginsResolver(settings)
        _register(_resolver)
    _resolver.add(make_source)


def _register(resolver: LoRAPluginsResolver) -> None:
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    _keep_http_headers()
    LoRAResolver.register(LoRAPluginsResolver)
    LoRAResolverRegistry.register_resolver(REGISTRY_NAME, resolver)
    _bind_when_serving(resolver)


def _bind_when_serving(resolver: LoRAPluginsResolver) -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    original = OpenAIServingModels.__init__

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.lora_resolver_lock = NameLocks()
        resolver.chain.base = describe_base(self, resolver.settings)
        _log_in_charge(resolver.chain)

    OpenAIServingModels.__init__ = wrapped


class NameLocks:
    """One lock per name for as long as somebody holds or awaits it.

    Takes the place of vLLM's `defaultdict(Lock)`, which keeps a lock for every name that was ever asked for.
    """

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def __len__(self) -> int:
        return len(self._locks)


def _log_in_charge(chain: SourceChain) -> None:
    from lora_plugins import __version__

    base, settings = chain.base, chain.settings
    logger.info(
        "lora-plugins %s resolves unknown model names from: %s (vLLM's builtin resolvers of these names do not run); "
        "base match %s, largest rank %s, %d module shapes known",
        __version__,
        ", ".join(str(source) for source in chain.sources),
        settings.base_match,
        base.max_rank if base else "unknown",
        len(base.module_shapes) if base else 0,
    )
    if not settings.runtime_lora_updating:
        logger.warning("vLLM asks no resolver unless VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is set; it is not")
    if _cpu_kernels_mix_up_base_rows():
        logger.warning(
            "On the CPU, vLLM before 0.33 computes base-model requests with an adapter when both share a batch "
            "(vllm-project/vllm#48421); serve the base model from another server, or upgrade vLLM"
        )
    if base and not base.lora_enabled:
        logger.warning("This server runs without --enable-lora; every adapter will be refused")


def _cpu_kernels_mix_up_base_rows() -> bool:
    import inspect

    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.platforms import current_platform

    # 0.33 masks index -1, which stands for "no adapter"; before, it selects the last slot.
    return bool(current_platform.is_cpu()) and "-1" not in inspect.getsource(lora_ops.bgmv_shrink)


def _keep_http_headers() -> None:
    from vllm.entrypoints.serve.exception_handling import register as module

    original = module.http_exception_handler

    @functools.wraps(original)
    async def wrapped(req: Any, exc: Any) -> Any:
        response = await original(req, exc)
        for name, value in (exc.headers or {}).items():
            response.headers[name] = value
        return response

    module.http_exception_handler = wrapped
