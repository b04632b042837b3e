"""Tiny models of many architectures of vLLM's registry: what each is made of, and what of it adapters can be for.

A new architecture is a new row. `make test-models` compares our verdict, vLLM's and this table (`tests/models/`), and
`make bench-models` writes the verdicts into `docs/reference/models.md`.
"""

from __future__ import annotations

from testbed.architecture import (
    EMBEDDINGS,
    EXPERTS,
    EXPERTS_KINDS,
    MAMBA,
    SLIDING,
    TIED,
    VOCABULARY,
    WORDS,
    Architecture,
    of_vllm_alone,
)
from testbed.recent_architectures import RECENT, TURNED

__all__ = ["ARCHITECTURES", "BY_NAME", "MLA", "Architecture"]

_TRANSFORMERS = (
    Architecture("LlamaForCausalLM", "llama", words=WORDS, is_quick=True),
    Architecture("MistralForCausalLM", "mistral"),
    Architecture("Qwen2ForCausalLM", "qwen2"),
    Architecture("Qwen3ForCausalLM", "qwen3", words=WORDS),
    Architecture("GemmaForCausalLM", "gemma", TIED),
    Architecture("Gemma2ForCausalLM", "gemma2", {**TIED, "query_pre_attn_scalar": 32}),
    Architecture("Gemma3ForCausalLM", "gemma3_text", {**TIED, **SLIDING, "query_pre_attn_scalar": 32}),
    Architecture("Phi3ForCausalLM", "phi3", words=WORDS, attention=("qkv_proj", "o_proj")),
    Architecture("Glm4ForCausalLM", "glm4"),
    Architecture("GraniteForCausalLM", "granite", words=WORDS),
    Architecture("CohereForCausalLM", "cohere", TIED, words=EMBEDDINGS),
    Architecture("Cohere2ForCausalLM", "cohere2", TIED),
    Architecture(
        "OPTForCausalLM",
        "opt",
        {**TIED, "ffn_dim": 192, "word_embed_proj_dim": 128, "intermediate_size": ...},
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
    ),
    Architecture("NemotronForCausalLM", "nemotron", words=WORDS),
    Architecture("Exaone4ForCausalLM", "exaone4", words=WORDS),
    Architecture("ApertusForCausalLM", "apertus", words=WORDS),
    Architecture("Ernie4_5ForCausalLM", "ernie4_5", words=WORDS),
    Architecture("HyperCLOVAXForCausalLM", "hyperclovax", words=WORDS),
    Architecture(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        attention=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        words=WORDS,
        is_peft_right=False,
    ),
    # With layers of Mamba beside attention.
    Architecture("FalconH1ForCausalLM", "falcon_h1", MAMBA, words=WORDS),
    Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "num_hidden_layers": ...,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_groups": 1,
            "expand": 1,
        },
        words=WORDS,
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_expand": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 192,
        },
        words=WORDS,
    ),
    # Computed by vLLM's Transformers backend. GPT-NeoX is not here: vLLM's CPU build answers the same request of its
    # base model differently from call to call, without any plugin too. Nor is Lfm2, whose answers were neither PEFT's
    # nor those of vLLM without plugins; why is not known.
    Architecture("GlmForCausalLM", "glm", words=EMBEDDINGS),
    Architecture("Starcoder2ForCausalLM", "starcoder2", words=EMBEDDINGS),
    Architecture("OlmoForCausalLM", "olmo", words=EMBEDDINGS),
    Architecture("Olmo2ForCausalLM", "olmo2", words=EMBEDDINGS),
    Architecture("PhiForCausalLM", "phi", attention=("q_proj", "k_proj", "v_proj", "dense"), words=EMBEDDINGS),
    Architecture("SmolLM3ForCausalLM", "smollm3", words=EMBEDDINGS),
    Architecture("SeedOssForCausalLM", "seed_oss", words=EMBEDDINGS),
    Architecture("ArceeForCausalLM", "arcee", words=EMBEDDINGS),
    # Mixtures of experts.
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        EXPERTS,
        words=WORDS,
        router="mlp.gate",
        only_made=EXPERTS_KINDS,
        vllms_router="block_sparse_moe.gate",
    ),
    Architecture("OlmoeForCausalLM", "olmoe", EXPERTS, router="mlp.gate", only_made=EXPERTS_KINDS, is_quick=True),
    Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 64},
        router="mlp.gate",
        # The last is the same module under its other name, which vLLM leaves without adapters where it is not named.
        more=("gate_up_proj", "down_proj", "shared_expert_gate", "expert_gate"),
    ),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, words=WORDS, router="mlp.gate", only_made=EXPERTS_KINDS),
    Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        EXPERTS,
        words=WORDS,
        router="block_sparse_moe.router",
        vllms_router="block_sparse_moe.gate",
        refused={"router": "named otherwise in vLLM (`block_sparse_moe.gate`), which refuses it too"},
    ),
    Architecture("GptOssForCausalLM", "gpt_oss", {**EXPERTS, **SLIDING}, router="mlp.router"),
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
        router="mlp.gate",
        only_made=EXPERTS_KINDS,
    ),
)

_VLLM_ALONE = (
    of_vllm_alone("InternLM2ForCausalLM", ("wqkv", "wo"), config={"bias": False}),
    of_vllm_alone("InternLM3ForCausalLM", config={"bias": False, "qkv_bias": False}, words=WORDS),
    of_vllm_alone(
        "ExaoneForCausalLM",
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        config={"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
        words=("wte", "lm_head"),
    ),
    of_vllm_alone(
        "MiniCPMForCausalLM", config={"scale_emb": 12, "dim_model_base": 64, "scale_depth": 1.4}, words=WORDS
    ),
    of_vllm_alone(
        "SolarForCausalLM",
        config={**{f"bskcn_{number}": [9] for number in range(1, 5)}, "bskcn_tv": [0.9, 0.8]},
        words=WORDS,
    ),
    of_vllm_alone("MiMoForCausalLM"),
    of_vllm_alone(
        "TeleChat2ForCausalLM",
        config={
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 192,
            "n_embed": 128,
            "ffn_hidden_size": 192,
            "layer_norm_epsilon": 1e-5,
        },
        words=WORDS,
    ),
    of_vllm_alone("TeleFLMForCausalLM", config={"use_mup": False}),
    of_vllm_alone("PanguEmbeddedForCausalLM", config={"bias": False}),
    of_vllm_alone("IQuestCoderForCausalLM", words=WORDS),
    of_vllm_alone(
        "ChatGLMModel",
        ("query_key_value", "dense"),
        config={
            "padded_vocab_size": VOCABULARY,
            "num_layers": 2,
            "kv_channels": 32,
            "ffn_hidden_size": 192,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 128,
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "layernorm_epsilon": 1e-5,
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "interleaved_qkv": False,
            "fp32_residual_connection": False,
            "original_rope": True,
            "hidden_dropout": 0.0,
        },
    ),
)

# With multi-head latent attention (MLA) and without experts; the head sizes are the only ones of vLLM's CPU kernel. Not
# among `ARCHITECTURES`: that kernel (0.32) answers equal requests of one batch, of the base model too, differently.
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
}
_MLA_ATTENTION = ("kv_b_proj",)
MLA = (
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", _MLA, attention=_MLA_ATTENTION),
    Architecture("DeepseekV3ForCausalLM", "deepseek_v3", {**_MLA, "q_lora_rank": 64}, attention=_MLA_ATTENTION),
)

ARCHITECTURES = (*_TRANSFORMERS, *_VLLM_ALONE, *RECENT)
# Beside the table's rows: for tests/models/test_tied_embeddings.py.
TIED_LLAMA = Architecture("LlamaForCausalLM", "llama", TIED, words=WORDS, variant="tied", tied=True)
BY_NAME = {one.label: one for one in (*ARCHITECTURES, *MLA, TURNED, TIED_LLAMA)}
