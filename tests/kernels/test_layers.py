"""Which of vLLM's layers tell true ranks; a mixture of experts is another kind, and is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA

from lora_plugins.kernels import layers
from lora_plugins.kernels.punica_cpu import GroupedPunicaWrapperCPU

EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, RANK = 4, 32, 16, 3, 8


def experts_layer(kind: type) -> torch.nn.Module:
    """vLLM's layer with its own buffers; only the fused kernel below it, which needs a GPU, is left out."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts=EXPERTS,
        intermediate_size_per_partition=INTERMEDIATE,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0),
    )
    layer.tp_size, layer.tp_rank, layer.device = 1, 0, torch.device("cpu")
    layer.enable_moe_shared_loras = False
    layer._w13_slices = 1 if kind is FusedMoE3DWithLoRA else 2
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.float32)
    layer.create_lora_weights(SLOTS, config, SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
    return layer


@pytest.mark.parametrize("kind", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
def test_a_mixture_of_experts_is_left_to_vllm(kind):
    layer = experts_layer(kind)
    assert layers.watch(layer) is None


@pytest.mark.parametrize("kind", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
def test_the_cpu_wrapper_starts_beside_a_mixture_of_experts(kind):
    wrapper = GroupedPunicaWrapperCPU(16, 4, "cpu", max_loras=SLOTS)
    layer = experts_layer(kind)
    wrapper.register(layer)
    given = [torch.ones(EXPERTS, RANK, HIDDEN), torch.ones(EXPERTS, RANK, INTERMEDIATE)]
    given_b = [torch.ones(EXPERTS, INTERMEDIATE * 2, RANK), torch.ones(EXPERTS, HIDDEN, RANK)]
    if kind is FusedMoEWithLoRA:
        given = [given[0], given[1], given[0]]
        given_b = [torch.ones(EXPERTS, INTERMEDIATE, RANK), given_b[1], torch.ones(EXPERTS, INTERMEDIATE, RANK)]
    layer.set_lora(1, given, given_b)  # vLLM's own: nothing of ours was wrapped around it
    assert layer.adapter_enabled.tolist() == [0, 1, 0, 0]
    assert layer.w2_lora_b_stacked[0][1].eq(1).all()
