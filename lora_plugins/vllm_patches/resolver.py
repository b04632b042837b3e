"""The resolver that vLLM asks for an unknown model name, with all our sources behind it.

Registered once per process; `OpenAIServingModels.__init__` (vllm/entrypoints/openai/models/serving.py, 0.30 to 0.33) is
wrapped, so that the base model is known when vLLM begins to serve.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.names import why_absent
from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError
from lora_plugins.findings import resolvers_not_asked
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.process import Process
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.server.base_model import describe_base
from lora_plugins.server.name_locks import NameLocks
from lora_plugins.store.model_file import ModelFile
from lora_plugins.vllm_patches import embeddings, model_modules, punica, response_digest
from lora_plugins.vllm_patches.access import require_in_force
from lora_plugins.vllm_patches.http_headers import keep_http_headers
from lora_plugins.vllm_patches.sagemaker import keep_model_of_body

REGISTRY_NAME = "lora-plugins"


class LoRAPluginsResolver:
    """Answers vLLM from the sources of this process.

    Duck-typed after `vllm.lora.resolver.LoRAResolver`, of which it is registered as a virtual subclass.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return a `LoRARequest`, or None where no source has the adapter; errors carry their HTTP status."""
        ours = self.process.resolver
        try:
            resolved = await ours.resolve(lora_name, base_model_name)
        except LoRAPluginsError as error:
            raise http_error(error) from None  # the event has been logged
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

    def before_serving(self) -> None:
        """Raise InvalidSettings where the server about to be made would serve without what was asked for."""
        require_in_force(self.process)

    def bind(self, models: Any) -> None:
        """Learn what base model is served, from vLLM's `OpenAIServingModels`, and log what is resolved from where."""
        keep_model_of_body()
        models.lora_resolver_lock = NameLocks()
        models.resolve_lora = _explaining(models.resolve_lora)
        self.process.resolver.base = describe_base(models, self.process.settings)
        self.process.resolver.describe_model = functools.partial(
            _describe_model, models.engine_client, models.model_config.model, self.process
        )
        _log_sources(self.process)


def register_resolver(process: Process) -> None:
    """Have vLLM ask our resolver; again, it changes nothing. Without sources it serves what is loaded by URI only.

    Raises:
        InvalidSettings: a prefix of `LORA_PLUGINS_ALLOWED_URIS` cannot be right.
    """
    AllowedUris.parse(process.settings.allowed_uris)  # startup fails, not the first load
    if process.is_resolver_registered:
        return
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    resolver = LoRAPluginsResolver(process)
    model_modules.patch()
    embeddings.patch()
    keep_http_headers()
    response_digest.patch(process)
    LoRAResolver.register(LoRAPluginsResolver)
    LoRAResolverRegistry.register_resolver(REGISTRY_NAME, resolver)
    when_serving(resolver.before_serving, resolver.bind)
    process.is_resolver_registered = True


def when_serving(before: Callable[[], None], after: Callable[[Any], None]) -> None:
    """Call `before` and `after` around the making of each `OpenAIServingModels`; if they raise, startup fails."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    original = OpenAIServingModels.__init__

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        before()
        original(self, *args, **kwargs)
        after(self)

    OpenAIServingModels.__init__ = wrapped


def _explaining(original: Any) -> Any:
    """A name that no resolver has is answered with what is wrong with it, where the name itself shows that.

    vLLM says "does not exist" of every such name. Not raised by our resolver: another one may have other names.
    """

    @functools.wraps(original)
    async def resolve_lora(lora_name: str) -> Any:
        result = await original(lora_name)
        error = getattr(result, "error", None)
        if error is not None and error.code == AdapterNotFound.http_status:
            reason = why_absent(lora_name)
            if reason is not None:
                raise http_error(reason)
        return result

    return resolve_lora


async def _describe_model(client: Any, base_path: str, process: Process) -> Model | None:
    """What the engine says of its model, kept in the store for the command line."""
    modules = await model_modules.ask_engine(client)
    if modules is None:
        return None
    logger.info("The engine's %s has %d modules for LoRA", modules.architecture, len(modules.places))
    try:
        await asyncio.to_thread(ModelFile(process.settings.store_dir, base_path).write, modules)
    except OSError as error:
        logger.warning("Which modules the model has cannot be written for lora-plugins inspect: %s", error)
    return model_modules.model_of(modules)


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
        base.max_rank if base else "unknown",
    )
    for finding in resolvers_not_asked(settings):
        logger.warning("%s", finding)
    if punica.base_rows_get_an_adapter():
        logger.warning(
            "On the CPU, vLLM before 0.33 computes base-model requests with an adapter when both share a batch "
            "(vllm-project/vllm#48421); name lora_kernels in VLLM_PLUGINS, or upgrade vLLM"
        )
    if base and not base.lora_enabled:
        logger.warning("This server runs without --enable-lora; every adapter will be refused")


LEDGER = (
    Patch(
        """
        vllm.lora.resolver:
            LoRAResolver.resolve_lora(self, base_model_name, lora_name)
            LoRAResolverRegistry
            _LoRAResolverRegistry.register_resolver(self, resolver_name, resolver)
        vllm.lora.request:
            LoRARequest{lora_name, lora_int_id, lora_path, base_model_name, is_3d_lora_weight}
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
        why="resolve_lora is given the model's path only, not its names and largest rank; and "
        "lora_resolver_lock keeps a lock for every name that was ever asked for",
        remove="LoRAResolver is given the model and LoRA configuration, and unused locks are dropped",
    ),
    Patch(
        """
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels.resolve_lora(self, lora_name)
        vllm.entrypoints.serve.engine.protocol:
            ErrorResponse{error}
            ErrorInfo{code}
        """,
        what="wrapped on the server's own instance: a 404 for a name that cannot be an adapter's says why",
        why="vLLM says the same of every name that no resolver has",
        remove="vLLM passes on what a resolver says of a name that it does not have",
    ),
)
