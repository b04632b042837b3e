"""The one resolver of a process: what vLLM asks for an unknown model name, with all our sources behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.process import EVENTS, settings_of_server
from lora_plugins.resolvers.resolution import SourceChain
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.server.base_model import describe_base
from lora_plugins.server.name_locks import NameLocks
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.opening import open_store
from lora_plugins.store.store import Store
from lora_plugins.vllm_patches import punica
from lora_plugins.vllm_patches.http_headers import keep_http_headers

REGISTRY_NAME = "lora-plugins"


class LoRAPluginsResolver:
    """Answers vLLM from our sources.

    Duck-typed after `vllm.lora.resolver.LoRAResolver`, of which it is registered as a virtual subclass. It is made in
    every process of vLLM, so threads and store are made at the first use, which only the API server comes to.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._make_sources: list[Callable[[Executor], Source]] = []

    def add(self, make_source: Callable[[Executor], Source]) -> None:
        """Ask this source too; it is made at the first use."""
        self._make_sources.append(make_source)

    def anew(self, settings: Settings) -> LoRAPluginsResolver:
        """Another one, of the same sources, with other settings."""
        other = LoRAPluginsResolver(settings)
        for make_source in self._make_sources:
            other.add(make_source)
        return other

    @functools.cached_property
    def chain(self) -> SourceChain:
        """The sources behind this resolver.

        Raises:
            InvalidSettings: the store cannot be made.
        """
        executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="lora-plugins")
        chain = SourceChain(self.settings, EVENTS, open_store(self.settings), executor=executor)
        for make_source in self._make_sources:
            chain.add(make_source(executor))
        return chain

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return a `LoRARequest`, or None where no source has the adapter; errors carry their HTTP status."""
        try:
            resolved = await self.chain.resolve(lora_name, base_model_name)
        except LoRAPluginsError as error:
            raise http_error(error) from None  # the event has been logged
        if resolved is None:
            return None
        base = self.chain.base
        # vLLM's server puts its own counter in the place of the id.
        return _lora_request(
            resolved.name,
            resolved.adapter_id,
            str(resolved.path),
            base.served_names[0] if base and base.served_names else None,
        )

    def require_what_it_needs(self) -> None:
        """Raise InvalidSettings where the server about to be made would serve without what was asked for."""
        if self.settings.policy is not None:
            from lora_plugins.vllm_patches.access import require_in_force

            require_in_force()

    def bind(self, models: Any) -> None:
        """Learn what base model is served, from vLLM's `OpenAIServingModels`, and say who is in charge."""
        models.lora_resolver_lock = NameLocks()
        self.chain.base = describe_base(models, self.settings)
        _log_in_charge(self.chain)


_resolver: LoRAPluginsResolver | None = None


def serve_from(make_source: Callable[[Executor], Source], settings: Settings) -> None:
    """Have vLLM ask this source too; called again for a source of the same label, it changes nothing."""
    resolver_of_process(settings).add(make_source)


def resolver_of_process(settings: Settings) -> LoRAPluginsResolver:
    """The one resolver of this process, made and registered at the first call; without sources it serves URIs only.

    Raises:
        InvalidSettings: a prefix of `LORA_PLUGINS_ALLOWED_URIS` cannot be right.
    """
    global _resolver
    AllowedUris.parse(settings.allowed_uris)  # a prefix that cannot be right ends the start
    if _resolver is None:
        _resolver = LoRAPluginsResolver(settings)
        keep_http_headers()
        _register_resolver(REGISTRY_NAME, _resolver)
        when_serving(_resolver.require_what_it_needs, _resolver.bind)
    return _resolver


def store_in_use() -> Store | None:
    """The store of this process's sources; None without any, and before the first use of them."""
    return None if _resolver is None or "chain" not in vars(_resolver) else _resolver.chain.store


def sources_of_worker() -> SourceChain | None:
    """The sources that this process was told of, for a worker that lacks an adapter's files; None without any.

    The base model is not looked at: the API server has, and the worker will match every tensor with its model.
    """
    if _resolver is None:
        return None
    return _resolver.anew(replace(_resolver.settings, base_match=BaseMatch.OFF)).chain


def sources_of_server() -> SourceChain:
    """The sources of this API server; without a resolver among the plugins, those that URIs name.

    Raises:
        InvalidSettings: the store cannot be made.
    """
    return resolver_of_process(settings_of_server()).chain


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
    if punica.base_rows_get_an_adapter():
        logger.warning(
            "On the CPU, vLLM before 0.33 computes base-model requests with an adapter when both share a batch "
            "(vllm-project/vllm#48421); name lora_kernels in VLLM_PLUGINS, or upgrade vLLM"
        )
    if base and not base.lora_enabled:
        logger.warning("This server runs without --enable-lora; every adapter will be refused")


def _register_resolver(name: str, resolver: Any) -> None:
    """Have vLLM ask `resolver`, whose class has a `resolve_lora`, for unknown model names."""
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    LoRAResolver.register(type(resolver))
    LoRAResolverRegistry.register_resolver(name, resolver)


def _lora_request(name: str, lora_id: int, path: str, base_model_name: str | None) -> Any:
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


LEDGER = (
    Patch(
        """
        vllm.lora.resolver:
            LoRAResolver.resolve_lora(self, base_model_name, lora_name)
            LoRAResolverRegistry
            _LoRAResolverRegistry.register_resolver(self, resolver_name, resolver)
        vllm.lora.request:
            LoRARequest{lora_name, lora_int_id, lora_path, base_model_name}
        """,
        what="implemented and registered once per process; it answers with a LoRARequest",
        why="this is how vLLM asks for unknown model names",
        remove="never: this is the public interface",
    ),
    Patch(
        """
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels.__init__(self, engine_client, base_model_paths, lora_modules)
            OpenAIServingModels{engine_client, model_config, base_model_paths, lora_requests, lora_resolver_lock}
        vllm.config.lora:
            LoRAConfig{max_lora_rank, fully_sharded_loras}
        """,
        what="__init__ wrapped: after it the base model is read (server/base_model.py) and lora_resolver_lock replaced",
        why="resolve_lora is given the model's path only, not its names, configuration, shapes and largest rank; and "
        "lora_resolver_lock keeps a lock for every name that was ever asked for",
        remove="LoRAResolver is given the model and LoRA configuration, and unused locks are dropped",
    ),
)
