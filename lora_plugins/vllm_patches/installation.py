"""Put all of it in place, in the order in which the wrappers have to lie."""

from __future__ import annotations

_installed = False


def install() -> None:
    """Have this process plan, load and serve adapters our way; called in each of vLLM's, a second call changes nothing.

    Raises:
        ImportError: a vLLM whose modules have other names.
    """
    global _installed
    if _installed:
        return
    from lora_plugins.vllm_patches import (
        async_llm,
        engine_core,
        llm_engine,
        lora_request,
        scheduler,
        serving_models,
        worker,
    )
    from lora_plugins.worker.slot_copy import patch_set_lora
    from lora_plugins.worker.weights_file import patch_safetensors

    patch_set_lora()
    patch_safetensors()
    lora_request.tell_versions_apart()
    worker.patch()
    scheduler.patch()
    engine_core.patch()
    async_llm.patch()
    llm_engine.patch()
    serving_models.patch()
    _installed = True


def is_installed() -> bool:
    """Whether adapters are planned and loaded our way in this process."""
    return _installed
