"""The resolver that vLLM asks for an unknown model name, with all our sources behind it; one in a process.

`register` and `take_over` run as plugins are loaded; the resolver answers in API servers, where vLLM asks
`resolve_lora` for a name and gets a `LoRARequest` or None. `begin_serving` runs once vLLM knows its base model.

vLLM has resolvers of its own under the same plugin names. Ours run in their place, whichever entry point is discovered
last.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from lora_plugins.adapter.fit import BaseModel, original_name_of
from lora_plugins.adapter.landing import Model
from lora_plugins.api.http_errors import as_http
from lora_plugins.findings import at_start
from lora_plugins.log import logger
from lora_plugins.process import Process
from lora_plugins.resolvers.single_flight import NameLocks
from lora_plugins.settings import Settings, environment
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches import engine_modules
from lora_plugins.vllm_patches.api_server.sagemaker import keep_model_of_body
from lora_plugins.vllm_patches.worker import punica_wrapper

REGISTRY_NAME = "lora-plugins"
_LOOK_S = 1.0
_BUILTIN = "lora_plugins_builtin"  # of our function: the one whose place it has


class LoRAPluginsResolver:
    """Answers vLLM from the sources of this process.

    Duck-typed after `vllm.lora.resolver.LoRAResolver`, and registered as its virtual subclass.

    Touches:
        vllm.lora.resolver: LoRAResolver.resolve_lora(self, base_model_name, lora_name)
            _LoRAResolverRegistry.register_resolver(self, resolver_name, resolver)
        vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path, base_model_name, is_3d_lora_weight}
    Why: this is how vLLM asks for unknown model names.
    Until: never: this is the public interface.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return a `LoRARequest`, or None where no source has the adapter; errors carry their HTTP status."""
        ours = self.process.resolver
        with as_http():  # the event has been logged
            # vLLM calls a resolver outside of its `try` (`OpenAIServingModels.resolve_lora`, 0.32): an error raised
            # here ends the request, and asks no further resolver.
            resolved = (await ours.look_up(lora_name, base_model_name)).version()
        if resolved is None:
            return None
        from vllm.lora.request import LoRARequest

        # vLLM's server puts its own counter in the place of the id.
        return LoRARequest(
            lora_name=resolved.name,
            lora_int_id=resolved.adapter_id,
            lora_path=str(resolved.path),
            is_3d_lora_weight=resolved.is_3d,
            base_model_name=ours.base.served_names[0] if ours.base and ours.base.served_names else None,
        )


def register(process: Process) -> None:
    """Have vLLM ask our resolver, once in a process."""
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    # `OpenAIServingModels.__init__` reads the registry, once: a resolver that is registered later is never asked.
    LoRAResolver.register(LoRAPluginsResolver)
    LoRAResolverRegistry.register_resolver(REGISTRY_NAME, LoRAPluginsResolver(process))


def begin_serving(models: Any, process: Process) -> None:
    """Take the served base model from vLLM's `OpenAIServingModels`, and log the sources.

    Locks of unused names are dropped: `lora_resolver_lock` is replaced.

    Touches:
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels{engine_client, model_config, base_model_paths, lora_requests, lora_resolver_lock}
        vllm.config.lora: LoRAConfig{max_lora_rank, fully_sharded_loras}
    Why: resolve_lora is given the model's path only, not its names and largest rank; and lora_resolver_lock keeps a
        lock for every name that was ever asked for.
    Until: LoRAResolver is given the model and LoRA configuration, and unused locks are dropped.
    """
    keep_model_of_body()
    # vLLM's `defaultdict` keeps the lock of every name that was ever asked for, and clients choose names.
    models.lora_resolver_lock = NameLocks()
    process.resolver.base = describe_base(models, process.settings)
    process.resolver.describe_model = functools.partial(
        _describe_model, models.engine_client, models.model_config.model, process
    )
    _log_sources(process)


async def end_with_engine(client: weakref.ref[Any], process: Process) -> None:
    """Give up look-ups and fetches once the engine has ended.

    Touches: vllm.v1.engine.async_llm: AsyncLLM{errored}
    Why: an API server that is told to end ends its engine first, and then waits for its clients, however long a fetch
        takes.
    Until: vLLM ends requests that have not reached its engine.
    """
    while (engine := client()) is not None:
        if engine.errored and process.has_opened_resolver:
            process.resolver.give_up()
        del engine
        await asyncio.sleep(_LOOK_S)


def describe_base(models: Any, settings: Settings) -> BaseModel:
    """Read the served base model from vLLM's `OpenAIServingModels`; only the engine knows the modules."""
    lora_config = getattr(getattr(models.engine_client, "vllm_config", None), "lora_config", None)
    return BaseModel(
        path=models.model_config.model,
        served_names=tuple(path.name for path in models.base_model_paths),
        aliases=settings.base_aliases,
        max_rank=None if lora_config is None else lora_config.max_lora_rank,
        lora_enabled=lora_config is not None,
        original_name=original_name_of(models.model_config.model),
    )


def take_over(module_name: str, function_name: str, register: Callable[[], None]) -> None:
    """Put `register` in the place of vLLM's builtin of the same entry-point name.

    vLLM imports both entry points and keeps the last discovered. If vLLM keeps its builtin, vLLM reads the builtin from
    the builtin's module after this function has run; if vLLM keeps ours, nothing else is needed. So ours runs in either
    order. A vLLM without the builtin is refused when ours runs, or has nothing to take over.

    Touches:
        vllm.plugins.lora_resolvers.filesystem_resolver: register_filesystem_resolver()
        vllm.plugins.lora_resolvers.hf_hub_resolver: register_hf_hub_resolver()
    Why: vLLM ships entry points of these names, and of several with one name it keeps the last discovered.
    Until: vLLM lets a user choose among entry points of one name.
    """
    try:
        setattr(register, _BUILTIN, builtin(module_name, function_name))
        setattr(importlib.import_module(module_name), function_name, register)
    except (ImportError, AttributeError):
        logger.debug("vLLM has no %s:%s to take over", module_name, function_name)


def builtin(module_name: str, function_name: str) -> Callable[[], None]:
    """Return the function of vLLM behind an entry point, taken over or not.

    Raises:
        ImportError, AttributeError: this vLLM has no such function.
    """
    function: Callable[[], None] = getattr(importlib.import_module(module_name), function_name)
    return getattr(function, _BUILTIN, function)


async def _describe_model(client: Any, base_path: str, process: Process) -> Model | None:
    """Return the engine's description of its model, kept in the store for the command line."""
    modules = await engine_modules.ask_engine(client)
    if modules is None:
        return None
    logger.info("The engine's %s has %d modules for LoRA", modules.architecture, len(modules.places))
    try:
        await asyncio.to_thread(ModelFile(process.settings.store_dir, base_path).write, modules)
    except OSError as error:
        logger.warning("Which modules the model has cannot be written for lora-plugins inspect: %s", error)
    return engine_modules.model_of(modules)


def _log_sources(process: Process) -> None:
    from lora_plugins import __version__

    ours, settings = process.resolver, process.settings
    base = ours.base
    logger.info(
        "lora-plugins %s resolves unknown model names from: %s (vLLM's builtin resolvers of these names do not run); "
        "base match %s, largest rank %s",
        __version__,
        ", ".join(str(source) for source in ours.sources),
        settings.base_match,
        (base and base.max_rank) or "unknown",
    )
    base_rows = punica_wrapper.base_rows_get_an_adapter()
    for finding in at_start(settings, environment(), base_rows_get_an_adapter=base_rows):
        logger.warning("%s", finding)
    if base and not base.lora_enabled:
        logger.warning("This server runs without --enable-lora; every adapter will be refused")
