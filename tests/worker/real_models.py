"""Tiny models of vLLM's own classes on the CPU, without weights, and worker managers over them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from lora_plugins.settings import Settings
from tests.worker.small_model import MAX_RANK

HIDDEN, INNER, EXPERTS = 64, 32, 4

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "torch_dtype": "float32",
}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "decoder_sparse_step": 1, "mlp_only_layers": []}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
        **_QWEN,
    },
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_QWEN},
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": EXPERTS,
        "num_key_value_heads": 2,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": EXPERTS,
        "sliding_window": 16,
        "layer_types": ["full_attention"],
    },
}
PER_EXPERT = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")


def configuration(directory: Path, name: str, *, slots: int = 2, **lora: Any) -> Any:
    """vLLM's configuration of one of `CONFIGS`; `lora` are fields of its `LoRAConfig`."""
    from vllm.config import LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig

    base = directory / name
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps({**_COMMON, **CONFIGS[name]}))
    model = ModelConfig(str(base), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    fields = {"max_lora_rank": MAX_RANK, "max_loras": slots, "max_cpu_loras": 4, "lora_dtype": torch.float32, **lora}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False)
    return VllmConfig(model_config=model, lora_config=LoRAConfig(**fields), scheduler_config=scheduler)


def manager_of(config: Any, kind: type | None = None) -> Any:
    """A worker manager over a model of its own; ours, or vLLM's `kind`."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from lora_plugins.worker.manager import PlannedWorkerLoRAManager

    make = kind or functools.partial(PlannedWorkerLoRAManager, settings=Settings.from_env())
    with set_default_torch_dtype(torch.float32):
        model = initialize_model(config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    manager = make(config, torch.device("cpu"), getattr(model, "embedding_modules", {}))
    manager.create_lora_manager(model, config)
    return manager


def slots_of_experts(manager: Any, index: int) -> dict[str, torch.Tensor]:
    """What one slot holds, by module, side and slice; modules of every kind."""
    held = {}
    for name, module in manager._adapter_manager.modules.items():
        for stack in _STACKS:
            stacks = getattr(module, stack, None)
            if isinstance(stacks, list) or stacks is None:
                continue  # views of the others
            for i, one in enumerate([stacks] if isinstance(stacks, torch.Tensor) else stacks):
                held[f"{name}.{stack}.{i}"] = one[index].clone()
    return held


_STACKS = ("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked",
           "w2_lora_b_stacked", "adapter_enabled")  # fmt: skip
