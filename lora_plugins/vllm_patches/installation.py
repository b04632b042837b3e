"""Patch vLLM in this process, so that the scheduler plans adapters and the workers carry the plan out."""

from __future__ import annotations

from lora_plugins.process import Process


def install(process: Process) -> None:
    """Patch everything, in order; called in each of vLLM's processes, a second call changes nothing.

    Raises:
        ImportError: a vLLM whose modules have other names.
    """
    if process.is_manager_patched:
        return
    from lora_plugins.vllm_patches import lora_request
    from lora_plugins.vllm_patches.api_server import async_llm, llm_engine, openai_serving_models
    from lora_plugins.vllm_patches.engine_core import engine_core, finite_answers, scheduler
    from lora_plugins.vllm_patches.worker import kv_blocks, vocab_parallel_embedding, worker_base
    from lora_plugins.worker.slot_copy import patch_set_lora
    from lora_plugins.worker.weights_file import patch_safetensors

    in_order = (
        # Layers and requests first: what is patched after them makes and compares these.
        vocab_parallel_embedding.patch,
        patch_set_lora,  # of the classes, before there are layers, of which lora_kernels wraps each one
        patch_safetensors,
        lora_request.distinguish_versions,
        # Then from the workers up to the API server: each wrapper calls what the one before has put in place.
        finite_answers.patch,
        kv_blocks.patch,
        worker_base.patch,
        scheduler.patch,
        engine_core.patch,  # calls the scheduler's planner and the workers' `lora_plugins_step`
        async_llm.patch,  # calls the engine core's utilities
        llm_engine.patch,
        openai_serving_models.patch,  # calls `AsyncLLM.add_lora`
    )
    for patch in in_order:
        patch()
    process.is_manager_patched = True
