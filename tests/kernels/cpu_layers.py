"""vLLM's LoRA layers of one process without base layers, and CPU wrappers that know a batch's adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping

IDS = [7, 5, 9]  # of the adapters in the slots
SLOTS = len(IDS)


def bare_layer(
    kind: type, widths: Sequence[int], inn: int, max_rank: int, dtype: torch.dtype = torch.float32, fill: float = 0.0
) -> Any:
    """A layer of this class, all of whose slots hold `fill`."""
    layer = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank = 1, 0
    layer.n_slices, layer.output_slices, layer.output_sizes = len(widths), tuple(widths), list(widths)
    layer.lora_a_stacked = tuple(torch.full((SLOTS, 1, max_rank, inn), fill, dtype=dtype) for _ in widths)
    layer.lora_b_stacked = tuple(torch.full((SLOTS, 1, width, max_rank), fill, dtype=dtype) for width in widths)
    return layer


def make_wrapper(kind: type, slot_of_row: Sequence[int], *layers: Any, sampled: Sequence[int] | None = None) -> Any:
    """A wrapper of this class, to which these layers are registered, before a batch of these slots' adapters."""
    wrapper = kind(256, max_batches=200, device="cpu")
    for layer in layers:
        wrapper.register(layer)
    map_rows(wrapper, slot_of_row, sampled)
    return wrapper


def map_rows(wrapper: Any, slot_of_row: Sequence[int], sampled: Sequence[int] | None = None) -> None:
    """Tell the wrapper of a batch, as vLLM does: by the adapters' ids, 0 for none."""

    def ids(slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if slot < 0 else IDS[slot] for slot in slots)

    prompts = slot_of_row if sampled is None else sampled
    # vLLM's own prefill metadata has no answer for no rows at all.
    mapping = LoRAMapping(ids(slot_of_row), ids(prompts), is_prefill=bool(slot_of_row))
    wrapper.update_metadata(mapping, IDS, SLOTS + 1, 100)
