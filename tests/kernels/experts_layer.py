"""vLLM's own LoRA layers around a mixture of experts, without the GPU that their base layer needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA


def experts_layer(kind: type, config: LoRAConfig, experts: int, hidden: int, intermediate: int) -> Any:
    """The layer with its own buffers; only the fused kernel of the base model below it is left out."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(
        hidden_dim=hidden,
        num_local_experts=experts,
        num_experts=experts,
        intermediate_size_per_partition=intermediate,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0),
    )
    layer.tp_size, layer.tp_rank, layer.device = 1, 0, torch.device("cpu")
    layer.enable_moe_shared_loras = False
    layer._w13_slices = 1 if kind is FusedMoE3DWithLoRA else 2
    layer.create_lora_weights(config.max_loras, config, SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
    return layer
