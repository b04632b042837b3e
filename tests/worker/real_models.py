"""Tiny models of vLLM's own classes on the CPU, without weights, and worker managers over them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind
from lora_plugins.settings import Settings
from testbed.model_kinds import ask_in_this_process
from tests.worker.small_model import MAX_RANK, Adapter, serve, slots_of

HIDDEN, INNER, EXPERTS = 64, 32, 4

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "torch_dtype": "float32",
}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "decoder_sparse_step": 1, "mlp_only_layers": []}
_TEXT = {key: value for key, value in _COMMON.items() if key not in ("num_experts_per_tok", "torch_dtype")}
_SIGHT = {
    **{key: _COMMON[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "image_size": 28,
    "patch_size": 14,
}


def _model(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **fields}


CONFIGS = {
    "mixtral": _model("MixtralForCausalLM", "mixtral", num_local_experts=EXPERTS),
    "qwen2-moe": _model("Qwen2MoeForCausalLM", "qwen2_moe", shared_expert_intermediate_size=48, **_QWEN),
    "qwen3-moe": _model("Qwen3MoeForCausalLM", "qwen3_moe", **_QWEN),
    "olmoe": _model("OlmoeForCausalLM", "olmoe", num_experts=EXPERTS),
    "gpt-oss": _model(
        "GptOssForCausalLM", "gpt_oss", num_local_experts=EXPERTS, sliding_window=16, layer_types=["full_attention"]
    ),
    "nemotron-h": _model(  # whose experts have no gate_proj
        "NemotronHForCausalLM",
        "nemotron_h",
        hybrid_override_pattern="E*",
        num_hidden_layers=2,
        **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), INNER),
        n_routed_experts=EXPERTS,
        **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
        norm_topk_prob=True,
        mlp_hidden_act="relu2",
    ),
    "deepseek-v2": _model(  # whose attention computes with absorbed weights of kv_b_proj
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        kv_lora_rank=512,
        q_lora_rank=None,
        **dict.fromkeys(("head_dim", "qk_rope_head_dim"), 64),
        **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 32),
        n_routed_experts=EXPERTS,
        first_k_dense_replace=1,
    ),
    "idefics3": _model(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        image_token_id=60,
        scale_factor=1,
        text_config=_model("LlamaForCausalLM", "llama", pad_token_id=0, **_TEXT),
        vision_config={"model_type": "idefics3_vision", **_SIGHT},
    ),
    "paligemma": _model(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        image_token_index=60,
        projection_dim=HIDDEN,
        text_config=_model("GemmaForCausalLM", "gemma", **_TEXT),
        vision_config={"model_type": "siglip_vision_model", "projection_dim": HIDDEN, **_SIGHT},
    ),
    "whisper": _model(  # an encoder and cross-attention, and no mapping of parts in vLLM's class
        "WhisperForConditionalGeneration",
        "whisper",
        is_encoder_decoder=True,
        d_model=HIDDEN,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=64,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1),
    ),
}
PER_EXPERT = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")


def configuration(
    directory: Path, name: str, *, slots: int = 2, parallel: dict[str, Any] | None = None, **lora: Any
) -> Any:
    """vLLM's configuration of one of `CONFIGS`, with these fields of its `ParallelConfig` and `LoRAConfig`."""
    from vllm.config import AttentionConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    base = directory / name
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps({**_COMMON, **CONFIGS[name]}))
    ask_in_this_process()
    model = ModelConfig(str(base), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    fields = {"max_lora_rank": MAX_RANK, "max_loras": slots, "max_cpu_loras": 4, "lora_dtype": torch.float32, **lora}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False)
    return VllmConfig(
        model_config=model,
        lora_config=LoRAConfig(**fields),
        scheduler_config=scheduler,
        parallel_config=ParallelConfig(**(parallel or {})),
        # On processors with AMX vLLM 0.32 takes a backend that has no float32.
        attention_config=AttentionConfig(backend=AttentionBackendEnum.CPU_MLA)
        if "kv_lora_rank" in CONFIGS[name]
        else AttentionConfig(),
    )


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


def held_in(manager: Any, index: int) -> dict[str, torch.Tensor]:
    """What one slot of every module holds, by module, side and slice."""
    held = {}
    for name, module in manager._adapter_manager.modules.items():
        for stack in _STACKS:
            stacks = getattr(module, stack, None)
            if isinstance(stacks, list) or stacks is None:
                continue  # views of the others
            for i, one in enumerate([stacks] if isinstance(stacks, torch.Tensor) else stacks):
                held[f"{name}.{stack}.{i}"] = one[index].clone()
    return held


def unlike_vllms(ours: Any, vllms: Any, adapter: Adapter) -> list[str]:
    """What slot 1 of our manager, in which it serves the adapter, holds otherwise than the slot of vLLM's manager."""
    serve(ours, adapter, 1)
    vllms.add_adapter(adapter.request())
    assert slots_of(ours)[:2] == [None, adapter.adapter_id]
    wanted, found = held_in(vllms, slots_of(vllms).index(adapter.adapter_id)), held_in(ours, 1)
    assert found.keys() == wanted.keys()
    assert all(tensor.any() for tensor in wanted.values()), "the adapter fills every module"
    return [place for place in wanted if not torch.equal(found[place], wanted[place])]


_STACKS = ("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked",
           "w2_lora_b_stacked", "adapter_enabled")  # fmt: skip


@contextmanager
def second_of_two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers that are made meanwhile are those of the second of two workers of tensor parallelism."""
    from vllm.distributed import parallel_state

    with monkeypatch.context() as patched:
        for group in (parallel_state.get_tp_group(), parallel_state.get_ep_group()):
            patched.setattr(group, "world_size", 2)
            patched.setattr(group, "rank_in_group", 1)
        yield


def tensors_for(modules: ModelModules, of_format: ExpertFormat, rank: int) -> dict[str, torch.Tensor]:
    """Random weights for every module of a model, the experts in this format, as PEFT names and shapes them."""
    generator = torch.Generator().manual_seed(0)
    is_stacked, is_shared = of_format is ExpertFormat.STACKED, of_format is ExpertFormat.SHARED
    tensors = {}
    for name, place in modules.places.items():
        if place.kind is ModuleKind.EXPERTS and (place.stacked > 1) is not is_stacked:
            continue
        ends = ("lora_embedding_A", "lora_embedding_B") if place.kind is ModuleKind.EMBEDDING else _ENDS
        assert place.in_features is not None
        assert place.out_features is not None
        shapes = [[rank * place.stacked, place.in_features], [place.out_features, rank * place.stacked]]
        if is_shared and place.kind is ModuleKind.EXPERTS:
            shapes = [[1, *shapes[0]], [EXPERTS, *shapes[1]]]
            if place.part == "w2":
                shapes[0][0], shapes[1][0] = EXPERTS, 1
        for end, shape in zip(ends, shapes, strict=True):
            tensors[f"base_model.model.{name}.{end}"] = torch.randn(*shape, generator=generator)
    return tensors


def write_adapter(
    directory: Path, adapter_id: int, tensors: Mapping[str, torch.Tensor], rank: int, *, is_3d: bool = False
) -> Adapter:
    """These tensors as an adapter; what its slots should hold is not noted."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "target_modules": ["experts"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(adapter_id, directory, {}, {}, is_3d)


_ENDS = ("lora_A.weight", "lora_B.weight")
