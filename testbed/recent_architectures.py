"""More rows of `testbed.architectures`: the bases of autumn 2026, and what of them this machine's build cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.architecture import EMBEDDINGS, EXPERTS, EXPERTS_KINDS, SLIDING, TIED, WORDS, Architecture, of_vllm_alone

# Gated DeltaNet: layers with a state beside layers of attention.
_DELTA_NET: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 64}
_SHARED_EXPERTS_MODULES = ("gate_up_proj", "down_proj", "shared_expert_gate", "expert_gate")
_GEMMA_4 = {
    **TIED,
    **SLIDING,
    "global_head_dim": 64,
    "sliding_window": 64,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 32,
}

_VALUES_OF_KEYS = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_QWENS_EYES = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_TOWER = {"all-linear": "its tower, which an engine of the text alone has not"}
_LLAMA_4 = {
    "intermediate_size_mlp": 192,
    "attention_chunk_size": 128,
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
}
_TURNED = "queries and keys, whose rows vLLM turns as it loads the base model, and not those of an adapter"
_BERTS = ("query", "key", "value")
_POOLER = {"all-linear": "its pooler, which vLLM's embedder has not"}
_HEAD = {"all-linear": "its head's layers, which vLLM cannot adapt"}
_LABELS = {"num_labels": 3}
_WHISPER = {
    **TIED,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192,
    "num_mel_bins": 16,
    "max_source_positions": 200,
    "max_target_positions": 64,
    # What the generation of a transcript begins and ends with, by `testbed.speech`.
    "decoder_start_token_id": 149,
    "bos_token_id": 148,
    "eos_token_id": 148,
    "pad_token_id": 148,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), ...),
    **dict.fromkeys(("num_hidden_layers", "head_dim", "max_position_embeddings"), ...),
}

RECENT = (
    Architecture("Ministral3ForCausalLM", "ministral3"),
    Architecture("GraniteSWAForCausalLM", "granite_swa", SLIDING, words=WORDS),
    # Layers that share keys and values, and Gemma's embeddings by layer.
    Architecture("Gemma4ForCausalLM", "gemma4_text", _GEMMA_4),
    # As the 26B and 31B: layers of full attention have no v_proj, and values are what k_proj gives.
    Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**_GEMMA_4, **_VALUES_OF_KEYS},
        variant="values of k_proj",
    ),
    Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA_NET, words=WORDS, is_computed=False),
    Architecture(
        "Llama4ForCausalLM",
        "llama4_text",
        _LLAMA_4,
        attention=("v_proj", "o_proj"),
        words=WORDS,
        refused=dict.fromkeys(("usual", "all-linear"), _TURNED),
    ),
    # Computed by vLLM's Transformers backend.
    Architecture("Olmo3ForCausalLM", "olmo3", {**SLIDING, "head_dim": ...}, words=EMBEDDINGS),
    Architecture("CwmForCausalLM", "cwm", SLIDING, words=EMBEDDINGS),
    Architecture(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {**TIED, **SLIDING, "query_pre_attn_scalar": 32},
        words=EMBEDDINGS,
        refused={"embeddings-head": "embeddings, which vLLM scales, and an adapter of them not"},
    ),
    Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", words=EMBEDDINGS),
    Architecture("Jais2ForCausalLM", "jais2", words=EMBEDDINGS),
    # Mixtures of experts.
    Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA_4,
            **_VALUES_OF_KEYS,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        variant="experts",
        router="router.proj",
        more=("gate_up_proj", "down_proj"),
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**EXPERTS, **_DELTA_NET, **_SHARED_EXPERT},
        router="mlp.gate",
        more=_SHARED_EXPERTS_MODULES,
        is_computed=False,
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {**EXPERTS, **_DELTA_NET, **_SHARED_EXPERT},
        words=WORDS,
        router="mlp.gate",
        more=_SHARED_EXPERTS_MODULES,
        is_computed=False,
    ),
    Architecture(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {**EXPERTS, "shared_intermediate_size": 64},
        words=WORDS,
        router="block_sparse_moe.router",
        vllms_router="block_sparse_moe.gate",
        more=("output_linear",),
        refused={
            "router": "named otherwise in vLLM (`block_sparse_moe.gate`), which refuses it too",
            "all-linear": "its shared expert's `input_linear`, which vLLM cannot adapt",
        },
    ),
    Architecture(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        {**EXPERTS, **SLIDING, "num_shared_experts": 1},
        words=WORDS,
        router="mlp.gate",
        only_made=EXPERTS_KINDS,
    ),
    # With zeros for the bias that takes part in the choice of experts: vLLM's router for CPUs (0.32) leaves it out.
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {**EXPERTS, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
        router="mlp.gate",
        only_made=EXPERTS_KINDS,
    ),
    # Without a class of this name in Transformers.
    of_vllm_alone("TeleChat3ForCausalLM", words=WORDS),
    of_vllm_alone("LLaMAForCausalLM", words=WORDS),
    # Text below a multimodal model, as most of this autumn's checkpoints are.
    Architecture(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {"text_config": {"rope_parameters": _MROPE}, "vision_config": _QWENS_EYES},
        words=WORDS,
        refused=_TOWER,
    ),
    Architecture(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {"text_config": _DELTA_NET, "vision_config": _QWENS_EYES},
        words=WORDS,
        refused=_TOWER,
        is_computed=False,
    ),
    # Embedders and classifiers.
    Architecture("Qwen2Model", "qwen2", pooled="last"),
    Architecture("LlamaModel", "llama", pooled="last"),
    Architecture("BertModel", "bert", attention=_BERTS, pooled="first", refused=_POOLER),
    Architecture("RobertaModel", "roberta", attention=_BERTS, pooled="first", refused=_POOLER),
    Architecture("ModernBertModel", "modernbert", attention=("Wqkv", "Wo"), pooled="first"),
    Architecture("LlamaForSequenceClassification", "llama", _LABELS, pooled="labels"),
    Architecture("Qwen3ForSequenceClassification", "qwen3", _LABELS, pooled="labels"),
    Architecture(
        "RobertaForSequenceClassification", "roberta", _LABELS, attention=_BERTS, pooled="labels", refused=_HEAD
    ),
    # Encoder and decoder: an audio is what requests are about.
    Architecture(
        "WhisperForConditionalGeneration",
        "whisper",
        _WHISPER,
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
        hears=True,
        is_quick=True,
    ),
)

# Of which vLLM takes an adapter and computes something else than was trained: not among the rows.
TURNED = Architecture(
    "Llama4ForCausalLM", "llama4_text", _LLAMA_4, variant="queries and keys", attention=("q_proj", "k_proj")
)

# Architectures that are not rows, and why.
NOT_RUN: Mapping[str, str] = {
    "DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, LongcatFlashForCausalLM": "with multi-head "
    "latent attention, whose kernel for CPUs (0.32) answers equal requests of one batch differently, of the base model "
    "too",
    "DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM (GLM-5)": "with the same attention, and an indexer (read, not tried)",
    "DeepseekV4ForCausalLM": "vLLM's class for CPUs takes no adapters (read, not tried)",
    "Glm5NextForCausalLM, HYV4ForCausalLM, InklingForCausalLM, KimiLinearForCausalLM, "
    "MiniMaxM3SparseForCausalLM, Qwen4ExpForCausalLM": "vLLM has them for GPUs (read, not tried)",
    "JambaForCausalLM, OlmoHybridForCausalLM": "their kernels for selective scan and the gated delta rule are not in "
    "vLLM's CPU build",
    "any model with INT8 weights and activations (W8A8 of compressed-tensors)": "on CPUs without AMX vLLM alone ends "
    "at the start with `--enable-lora`: its kernel leaves a layer's `weight` None, where vLLM looks for the device; "
    "with AMX some tokens differed from those without plugins, whether by rounding is not known",
    "any model with FP8 weights": "vLLM's kernels for CPUs need AMX (read, not tried)",
    "LagunaForCausalLM": "an assertion of vLLM's on CPUs ends its first step",
    "AfmoeForCausalLM, HYV3ForCausalLM, MiniMaxM2ForCausalLM": "their classes in vLLM do not make a "
    "model of Transformers' own configuration",
    "Rnj1ForCausalLM": "vLLM's attention for CPUs (0.32) lacks its windows",
    "Gemma4ForConditionalGeneration, Gemma3ForConditionalGeneration": "their processors need torchvision, which vLLM's "
    "CPU build does not bring",
    "Lfm2ForCausalLM, Lfm2MoeForCausalLM, GPTNeoXForCausalLM": "vLLM's CPU build answers the same request of the base "
    "model differently, without any plugin too, or neither as PEFT nor as without plugins",
    "BloomForCausalLM, DbrxForCausalLM, FalconForCausalLM, Gemma3nForCausalLM, Gemma3TextModel, GPT2LMHeadModel, "
    "GPTJForCausalLM, MambaForCausalLM, Mamba2ForCausalLM, MiMoV2FlashForCausalLM, StableLmForCausalLM, "
    "Step3p5ForCausalLM, Zamba2ForCausalLM": "vLLM 0.32 has no adapters for them (read, not tried)",
}
