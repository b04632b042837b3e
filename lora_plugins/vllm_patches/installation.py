"""The patches that each of our plugins needs, in the order in which they are made.

vLLM calls the plugins in each of its processes, and each process makes all patches: a patch takes effect in the
process that uses the patched object, as the folder says. Every patch is made once, whichever plugins need the patch.
"""

from __future__ import annotations

from lora_plugins.process import Process
from lora_plugins.resolvers.sources.uri import AllowedUris


def install_resolver(process: Process) -> None:
    """Have vLLM ask our resolver. Without sources the resolver serves only adapters loaded by URI.

    Raises:
        InvalidSettings: a prefix of `LORA_PLUGINS_ALLOWED_URIS` cannot be right.
    """
    AllowedUris.parse(process.settings.allowed_uris)  # startup fails, not the first load
    if process.is_resolver_registered:
        return
    from lora_plugins.vllm_patches import engine_modules
    from lora_plugins.vllm_patches.api_server import adapter_chats, lora_resolver
    from lora_plugins.vllm_patches.worker import adapter_rows

    engine_modules.patch()
    adapter_rows.patch()
    _patch_api_server()
    adapter_chats.patch()
    lora_resolver.register(process)
    process.is_resolver_registered = True


def install_manager(process: Process) -> None:
    """Have the scheduler plan adapters and the workers carry the plan out.

    Raises:
        ImportError: a vLLM whose modules have other names.
    """
    if process.is_manager_patched:
        return
    from lora_plugins.vllm_patches import lora_request
    from lora_plugins.vllm_patches.api_server import async_llm, llm_engine, output_processor
    from lora_plugins.vllm_patches.engine_core import engine_core, pausing, scheduler
    from lora_plugins.vllm_patches.worker import adapter_rows, model_runner, punica_wrapper, worker_base
    from lora_plugins.worker.slot_copy import patch_set_lora
    from lora_plugins.worker.weights_file import patch_safetensors

    # Layers and requests first: later patches make and compare layers and requests.
    adapter_rows.patch()
    patch_set_lora()  # the classes, before there are layers: lora_kernels wraps each layer
    patch_safetensors()
    punica_wrapper.patch_hash()
    lora_request.distinguish_versions()
    # Then from the workers up to the API server: each wrapper calls the wrapper before.
    model_runner.patch()
    worker_base.patch()
    scheduler.patch()
    engine_core.patch()  # calls the scheduler's planner and the workers' `lora_plugins_step`
    pausing.patch()
    async_llm.patch()  # calls the engine core's utilities
    llm_engine.patch()
    output_processor.patch_requests()
    _patch_api_server()
    process.is_manager_patched = process.log.waits_for_load = True


def _patch_api_server() -> None:
    """Patch what resolver and manager both need in API servers."""
    from lora_plugins.vllm_patches.api_server import (
        base_serving,
        error_responses,
        openai_serving_models,
        output_processor,
        web_application,
    )

    for module in (openai_serving_models, base_serving, output_processor, error_responses, web_application):
        module.patch()


def install_kernels(process: Process) -> None:
    """Have the workers compute adapters with our kernels.

    Raises:
        InvalidSettings: the chosen kernels cannot be had on this machine.
    """
    from lora_plugins.vllm_patches.api_server import web_application
    from lora_plugins.vllm_patches.worker import adapter_rows, punica_wrapper

    punica_wrapper.patch(process.settings)
    adapter_rows.patch()
    web_application.patch()
