"""Our Triton kernels behind vLLM's punica interface: the class whose methods compute LoRA for all layers of a worker.

vLLM makes one wrapper in each worker with a GPU, and each layer registers once at start. vLLM then calls
`update_metadata` for each batch whose adapters change, and `add_...` from each layer in every step. The methods launch
kernels that change `y` in place (`triton_ops/operators.py`).

Source of the interface: `PunicaWrapperGPU` in vllm/lora/punica_wrapper/punica_gpu.py, 0.30 to 0.33. Mixtures of experts
stay vLLM's; everything else is overridden. Without experts `update_metadata` leaves vLLM's grouping of rows out, and
with the grouping a transfer from the device that vLLM waits for in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from lora_plugins.errors import InvalidSettings
from lora_plugins.kernels import layers
from lora_plugins.kernels.triton_ops.operators import Batch, Operators
from lora_plugins.kernels.tuning import load_table
from lora_plugins.log import logger


class TritonPunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Cuts rows into chunks once per batch, on the device; the work follows each slot's own rank.

    `x` is `[rows, in]` and `y` `[rows, out]`, both perhaps with leading dimensions; stacks are as in
    `lora_plugins.kernels.reference`. float16, bfloat16 and float32.

    `update_metadata` only finds each row's slot, without vLLM's grouping, unless a layer is computed by vLLM's own
    path. As long as no layer is, reading the grouping raises (`_NeverFilled`). The wrapper's constructor reads in the
    configuration whether rows must not depend on each other, and `compilation_config.max_cudagraph_capture_size`.

    Touches:
        vllm.lora.punica_wrapper.punica_gpu:
            PunicaWrapperGPU{add_shrink, add_expand, add_lora_embedding, add_lora_linear, add_lora_logits,
                update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)}
            PunicaWrapperGPU.apply_lora_full_linear(self, y, x, weight_stacked, bias_stacked,
                module_enabled) # since 0.31
            PunicaWrapperGPU{token_mapping_meta, prompt_mapping_meta, lora_config}
        vllm.lora.punica_wrapper.punica_base:
            PunicaWrapperBase._update_base_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size)
            PunicaWrapperBase._select_full_linear_output(self, y, adapter_y, bias_stacked, module_enabled) # since 0.31
        vllm.lora.layers.utils: LoRAMapping{index_mapping, prompt_mapping, is_prefill}
        vllm.envs: VLLM_BATCH_INVARIANT
    Why: vLLM's work follows max_lora_rank, and it groups rows with a wait for the device in every step.
    Until: vLLM's Triton kernels know true ranks and group rows on the device.
    """

    token_mapping_meta: Any
    prompt_mapping_meta: Any
    computes_vectors = True  # `worker/vectors.py`

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._operators = _operators(torch.device(device))
        self._rows = Batch(max_num_batched_tokens, self.max_loras, device, self._operators)
        self._rows.host[4] = 1  # refuse more rows than the batch has; `_sampled` takes more, as logits of prompts have
        self._sampled = Batch(max_num_batched_tokens, self.max_loras, device, self._operators)
        self._has_layers = False
        self._some_by_vllm = False
        # vLLM's own objects, kept for the first layer that vLLM's own path computes.
        self._grouping = self.token_mapping_meta, self.prompt_mapping_meta
        self.token_mapping_meta = self.prompt_mapping_meta = _NeverFilled()

    def register(self, module: Any) -> None:
        """Prepare for a layer that will call this wrapper.

        `set_mapping` of the layer calls `register`, after the layer's weights were created.
        """
        self._has_layers = True
        layer = layers.watch(module)
        if layer is not None:
            # Memory for vectors is 54 MB a slot of a 70B model: none is taken where all are refused.
            self._operators.register(*layer, takes_vectors=not layers.option_without_vectors(self.lora_config))
            return
        if not self._some_by_vllm:
            logger.info("Triton kernels: %s is computed by vLLM's own path", type(module).__name__)
        self._some_by_vllm = True
        self.token_mapping_meta, self.prompt_mapping_meta = self._grouping

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Cut the next batch into chunks; vLLM calls this method when the rows' adapters change."""
        if self._some_by_vllm or not self._has_layers:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        else:
            self.is_prefill = mapping.is_prefill
            self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        # The host knows the adapters of a batch from vLLM's mapping, and never asks the device.
        slot_of = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        for batch, ids, slots in (
            (self._rows, mapping.index_mapping, self.token_lora_indices),
            (self._sampled, mapping.prompt_mapping, self.sampler_indices),
        ):
            # Ids above 0 are adapters; an adapter without a slot counts as rows of the base model.
            distinct = set(ids)
            in_use = {slot_of[lora_id] for lora_id in distinct if lora_id > 0 and lora_id in slot_of}
            batch.cut(slots, in_use, base_rows=len(in_use) < len(distinct))

    def add_shrink(self, y: Any, x: Any, lora_a_stacked: Sequence[Any], scale: float, **kwargs: Any) -> None:
        """Compute `y[i] = scale * A_i x` in place, for layers that gather between shrink and expand (fully sharded)."""
        x = x.view(-1, x.shape[-1])
        torch.ops.lora_plugins.lora_shrink(y, x, list(lora_a_stacked), *self._rows.tensors, scale)

    def add_expand(
        self,
        y: Any,
        x: Any,
        lora_b_stacked: Sequence[Any],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compute `y[:, slice i] += B_i x[i]` in place, for fully sharded layers, which gather before the expand."""
        y = y.view(-1, y.shape[-1])
        torch.ops.lora_plugins.lora_expand(
            y, x, list(lora_b_stacked), *self._rows.tensors, list(output_slices), offset_start, add_inputs
        )

    def add_lora_embedding(self, y: Any, x: Any, lora_b_stacked: Any, add_inputs: bool = True, **kwargs: Any) -> None:
        """Compute `y += B x` in place, where `x` `[rows, max_rank]` is the layer's look-up in A."""
        self.add_expand(y, x.unsqueeze(0), (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

    def add_lora_linear(
        self,
        y: Any,
        x: Any,
        lora_a_stacked: Sequence[Any],
        lora_b_stacked: Sequence[Any],
        scale: float,
        output_slices: Sequence[int],
        *,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compute `y += scale * B A x`, then `y = g * y + c`, in place, each row with its own adapter."""
        self._linear(self._rows, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, add_inputs=add_inputs)

    def add_lora_logits(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **kwargs: Any
    ) -> None:
        """Compute `y += scale * B A x` in place, with the adapter of each sampled row."""
        # vLLM pads the vocabulary of B or of `y`; the narrower width has all real columns.
        width = min(lora_b_stacked.shape[-2], y.shape[-1])
        self._linear(self._sampled, y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (width,), add_inputs=True)

    def apply_lora_full_linear(
        self, y: Any, x: Any, weight_stacked: Any, bias_stacked: Any, module_enabled: Any
    ) -> None:
        """Replace `y` by the output of the slot's whole head, `[slots, 1, out, in]`, in rows with such a head."""
        # A head is an A of rank `out`: the shrink, with a scale of 1, computes the head's product too.
        adapter_y = torch.empty(1, x.shape[0], weight_stacked.shape[-2], dtype=torch.float32, device=x.device)
        torch.ops.lora_plugins.lora_shrink(adapter_y, x, [weight_stacked], *self._sampled.tensors, 1.0)
        y.copy_(self._select_full_linear_output(y, adapter_y[0], bias_stacked, module_enabled))

    def _linear(
        self, batch: Batch, y: Any, x: Any, a: Any, b: Any, scale: float, output_slices: Any, *, add_inputs: bool
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        # An offset of 0: the slices begin at the first column of `y`.
        torch.ops.lora_plugins.lora_linear(
            y, x, list(a), list(b), *batch.tensors, list(output_slices), scale, 0, add_inputs
        )


class _NeverFilled:
    """In the place of vLLM's grouping of rows, where no layer needs the grouping.

    vLLM's operators take a grouping that nobody fills for a batch without adapters, and compute nothing.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and torch ask every object for its protocols
            raise AttributeError(name)
        raise InvalidSettings(
            "a model that was compiled for vLLM's own LoRA kernels, in vLLM's compile cache",
            expected="one that was compiled for the kernels of LORA_PLUGINS_KERNELS",
            remedy="delete torch_compile_cache in VLLM_CACHE_ROOT, and start again",
        )


def _operators(device: Any) -> Operators:
    table = load_table(_architecture(device))
    table = table.invariant() if envs.VLLM_BATCH_INVARIANT else table
    config = get_current_vllm_config_or_none()
    # 0 without a configuration, and where CUDA graphs are off: then no size is captured.
    captured = getattr(getattr(config, "compilation_config", None), "max_cudagraph_capture_size", None) or 0
    logger.info("Triton kernels cut their work by %s", table.origin)
    return Operators(table, captured_rows=captured)


def _architecture(device: Any) -> str:
    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
