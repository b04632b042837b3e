"""Logits of prompts (`prompt_logprobs`), computed in a worker with the adapter of each row's own request.

vLLM names the adapters of sampled rows with a batch. For `prompt_logprobs` a runner then has the model compute logits
of other rows, some consecutive rows of the batch at a time, and `lm_head` would meet the adapters of sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.lora.layers.utils import LoRAMapping, LoRAMappingType

# The hidden states of a whole batch, while a runner computes logits of prompts (`vllm_patches/worker/model_runner.py`).
rows_of_batch: ContextVar[torch.Tensor | None] = ContextVar("rows_of_batch", default=None)


class PromptRows:
    """Names the adapters of a prompt's rows, in the place of sampled rows', while the model computes their logits.

    Args:
        manager: vLLM's `LoRAModelManager`, which has wrapped the model's layers.

    Touches:
        vllm.model_executor.models.interfaces_base: VllmModelForTextGeneration.compute_logits(self, hidden_states)
        vllm.lora.model_manager: LoRAModelManager{model, _set_adapter_mapping(self, mapping)}
        vllm.lora.layers.utils: LoRAMapping{index_mapping, prompt_mapping, type} LoRAMappingType{LANGUAGE}
    Why: rows of a prompt would meet the adapters of the batch's first sampled rows, and vLLM's CPU kernels would raise.
    Until: vLLM names the adapter of each row of the head.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._mapping = manager, LoRAMapping((), ())
        if hasattr(manager.model, "compute_logits"):  # not of a model for pooling
            manager.model.compute_logits = partial(self._with_own_adapters, manager.model.compute_logits)

    def begin_batch(self, mapping: LoRAMapping) -> None:
        if mapping.type is LoRAMappingType.LANGUAGE:  # the rows of encoders have none of the head's
            self._mapping = mapping

    def _with_own_adapters(self, original: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole, of_batch = rows_of_batch.get(), self._mapping
        if whole is None:
            return original(hidden, *args, **kwargs)
        # `hidden` is a slice of the batch's rows, as both runners cut it; a copy would start at another offset.
        first = (hidden.storage_offset() - whole.storage_offset()) // whole.stride(0)
        rows = of_batch.index_mapping[first : first + hidden.shape[0]]
        self._manager._set_adapter_mapping(replace(of_batch, prompt_mapping=rows))  # noqa: SLF001 - see "Touches"
        logits = original(hidden, *args, **kwargs)
        self._manager._set_adapter_mapping(of_batch)  # noqa: SLF001
        return logits
