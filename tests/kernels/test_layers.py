"""Which of vLLM's layers tell true ranks; a mixture of experts is another kind, and is left to vLLM."""

from __future__ import annotations

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA

from lora_plugins.kernels import layers
from lora_plugins.kernels.punica_cpu import ReferencePunicaWrapper
from tests.kernels.experts_layer import experts_layer

EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, RANK = 4, 32, 16, 3, 8


def small_layer(kind: type) -> torch.nn.Module:
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.float32)
    return experts_layer(kind, config, EXPERTS, HIDDEN, INTERMEDIATE)


@pytest.mark.parametrize("kind", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
def test_a_mixture_of_experts_is_left_to_vllm(kind):
    layer = small_layer(kind)
    assert layers.watch(layer) is None


@pytest.mark.parametrize("kind", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
def test_the_cpu_wrapper_starts_beside_a_mixture_of_experts(kind):
    wrapper = ReferencePunicaWrapper(16, 4, "cpu", max_loras=SLOTS)
    layer = small_layer(kind)
    wrapper.register(layer)
    given = [torch.ones(EXPERTS, RANK, HIDDEN), torch.ones(EXPERTS, RANK, INTERMEDIATE)]
    given_b = [torch.ones(EXPERTS, INTERMEDIATE * 2, RANK), torch.ones(EXPERTS, HIDDEN, RANK)]
    if kind is FusedMoEWithLoRA:
        given = [given[0], given[1], given[0]]
        given_b = [torch.ones(EXPERTS, INTERMEDIATE, RANK), given_b[1], torch.ones(EXPERTS, INTERMEDIATE, RANK)]
    layer.set_lora(1, given, given_b)  # vLLM's own: nothing of ours was wrapped around it
    assert layer.adapter_enabled.tolist() == [0, 1, 0, 0]
    assert layer.w2_lora_b_stacked[0][1].eq(1).all()
