"""Tiny models of many architectures of vLLM's registry: what each is made of, and what of it adapters can be for.

A new architecture is a new row. `make test-models` compares our verdict, vLLM's and this table (`tests/models/`), and
`make bench-models` writes the verdicts into `docs/reference/models.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 256
# Head size 32: less is too small for vLLM's attention on CPUs.
_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
# The list of most recipes, whatever the model has of these names: PEFT passes over what the model has not.
_USUAL = (*_QKVO, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        name: in vLLM's registry.
        model_type: of its configuration in Transformers.
        config: what it has beyond, or other than, the common small sizes; `...` leaves a key out.
        attention: PEFT's targets for an adapter of attention alone.
        words: its embeddings and its head, of those that PEFT and vLLM both adapt.
        router: what chooses experts, as PEFT's target; its experts are fused, and fused experts with adapters need
            Triton: on CPUs the engine is to adapt all other modules (vLLM's --lora-target-modules).
        vllms_router: its name in vLLM, where that is another one.
        only_made: kinds of adapters of its experts: the model is made, and the adapter loaded, and nothing computed.
        more: further modules of a mixture of experts that the engine is to adapt.
        has_peft: whether Transformers has a class of this name, so that PEFT can say what is right; vLLM's own loading
            of a model with random weights says it elsewhere.
        is_peft_right: whether vLLM's base model computes what that class does, so that PEFT says what is right.
        refused: kinds of adapters that are not served, and why.
        is_quick: whether it is in the normal test run.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = _QKVO
    words: tuple[str, ...] = ()
    router: str = ""
    vllms_router: str = ""
    only_made: tuple[str, ...] = ("experts",)
    more: tuple[str, ...] = ()
    has_peft: bool = True
    is_peft_right: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of its config.json."""
        return {key: value for key, value in {**_SMALL, **self.config}.items() if value is not ...}

    @property
    def only(self) -> tuple[str, ...]:
        """What the engine adapts, where it is not everything."""
        if not self.router:
            return ()
        return (*self.attention, (self.vllms_router or self.router).rpartition(".")[2], *self.more, *self.words)

    def kinds(self) -> dict[str, dict[str, Any]]:
        """Kinds of adapters, with the arguments of PEFT's `LoraConfig`."""
        attention = list(self.attention)
        kinds: dict[str, dict[str, Any]] = {
            "all-linear": {"target_modules": "all-linear"},
            "attention": {"target_modules": attention},
            "rslora": {"target_modules": attention, "use_rslora": True},
            "patterns": {
                "target_modules": attention,
                "rank_pattern": {attention[0]: 16, f"1.*.{attention[-1]}": 4},
                "alpha_pattern": {attention[-1]: 4},
            },
        }
        if self.has_peft or set(attention) & set(_USUAL):
            kinds["usual"] = {"target_modules": list(_USUAL)}
        if self.words:
            kinds["embeddings-head"] = {"target_modules": list(self.words)}
        if self.router:
            kinds["router"] = {"target_modules": [], "target_parameters": [f"{self.router}.weight"]}
            experts = ["experts.gate_up_proj", "experts.down_proj"]
            kinds["experts"] = {"target_modules": [], "target_parameters": experts}
        return kinds


_WORDS = ("embed_tokens", "lm_head")
_EMBEDDINGS = ("embed_tokens",)
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_d_ssm": 128}
_EXPERTS_KINDS = ("experts", "all-linear", "usual")
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}

_TRANSFORMERS = (
    Architecture("LlamaForCausalLM", "llama", words=_WORDS, is_quick=True),
    Architecture("MistralForCausalLM", "mistral"),
    Architecture("Qwen2ForCausalLM", "qwen2"),
    Architecture("Qwen3ForCausalLM", "qwen3", words=_WORDS),
    Architecture("GemmaForCausalLM", "gemma", _TIED),
    Architecture("Gemma2ForCausalLM", "gemma2", {**_TIED, "query_pre_attn_scalar": 32}),
    Architecture("Gemma3ForCausalLM", "gemma3_text", {**_TIED, **_SLIDING, "query_pre_attn_scalar": 32}, is_quick=True),
    Architecture("Phi3ForCausalLM", "phi3", words=_WORDS, attention=("qkv_proj", "o_proj")),
    Architecture("Glm4ForCausalLM", "glm4"),
    Architecture("GraniteForCausalLM", "granite", words=_WORDS),
    Architecture("CohereForCausalLM", "cohere", _TIED, words=_EMBEDDINGS),
    Architecture("Cohere2ForCausalLM", "cohere2", _TIED),
    Architecture(
        "OPTForCausalLM",
        "opt",
        {**_TIED, "ffn_dim": 192, "word_embed_proj_dim": 128, "intermediate_size": ...},
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
        is_quick=True,
    ),
    Architecture("NemotronForCausalLM", "nemotron", words=_WORDS),
    Architecture("Exaone4ForCausalLM", "exaone4", words=_WORDS),
    Architecture("ApertusForCausalLM", "apertus", words=_WORDS),
    Architecture("Ernie4_5ForCausalLM", "ernie4_5", words=_WORDS),
    Architecture("HyperCLOVAXForCausalLM", "hyperclovax", words=_WORDS),
    Architecture(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        attention=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        words=_WORDS,
        is_peft_right=False,
    ),
    # With layers of Mamba beside attention.
    Architecture("FalconH1ForCausalLM", "falcon_h1", _MAMBA, words=_WORDS),
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
        words=_WORDS,
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_expand": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 192,
        },
        words=_WORDS,
    ),
    # Computed by vLLM's Transformers backend. GPT-NeoX is not here: vLLM's CPU build answers the same request of its
    # base model differently from call to call, without any plugin too. Nor is Lfm2, whose answers were neither PEFT's
    # nor those of vLLM without plugins; why is not known.
    Architecture("GlmForCausalLM", "glm", words=_EMBEDDINGS),
    Architecture("Starcoder2ForCausalLM", "starcoder2", words=_EMBEDDINGS),
    Architecture("OlmoForCausalLM", "olmo", words=_EMBEDDINGS),
    Architecture("Olmo2ForCausalLM", "olmo2", words=_EMBEDDINGS),
    Architecture("PhiForCausalLM", "phi", attention=("q_proj", "k_proj", "v_proj", "dense"), words=_EMBEDDINGS),
    Architecture("SmolLM3ForCausalLM", "smollm3", words=_EMBEDDINGS),
    Architecture("SeedOssForCausalLM", "seed_oss", words=_EMBEDDINGS),
    Architecture("ArceeForCausalLM", "arcee", words=_EMBEDDINGS),
    # Mixtures of experts.
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        _EXPERTS,
        words=_WORDS,
        router="mlp.gate",
        only_made=_EXPERTS_KINDS,
        vllms_router="block_sparse_moe.gate",
    ),
    Architecture("OlmoeForCausalLM", "olmoe", _EXPERTS, router="mlp.gate", only_made=_EXPERTS_KINDS, is_quick=True),
    Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 64},
        router="mlp.gate",
        # The last is the same module under its other name, which vLLM leaves without adapters where it is not named.
        more=("gate_up_proj", "down_proj", "shared_expert_gate", "expert_gate"),
    ),
    Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS, words=_WORDS, router="mlp.gate", only_made=_EXPERTS_KINDS
    ),
    Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        _EXPERTS,
        words=_WORDS,
        router="block_sparse_moe.router",
        vllms_router="block_sparse_moe.gate",
        refused={"router": "named otherwise in vLLM (`block_sparse_moe.gate`), which refuses it too"},
    ),
    Architecture("GptOssForCausalLM", "gpt_oss", {**_EXPERTS, **_SLIDING}, router="mlp.router"),
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
        router="mlp.gate",
        only_made=_EXPERTS_KINDS,
    ),
)


def _of_vllm_alone(name: str, attention: tuple[str, ...] = _QKVO, **values: Any) -> Architecture:
    """One without a class of its name in Transformers, with a configuration much like Llama's."""
    return Architecture(name, "llama", attention=attention, has_peft=False, **values)


_VLLM_ALONE = (
    _of_vllm_alone("InternLM2ForCausalLM", ("wqkv", "wo"), config={"bias": False}),
    _of_vllm_alone("InternLM3ForCausalLM", config={"bias": False, "qkv_bias": False}, words=_WORDS),
    _of_vllm_alone(
        "ExaoneForCausalLM",
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        config={"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
        words=("wte", "lm_head"),
    ),
    _of_vllm_alone(
        "MiniCPMForCausalLM", config={"scale_emb": 12, "dim_model_base": 64, "scale_depth": 1.4}, words=_WORDS
    ),
    _of_vllm_alone(
        "SolarForCausalLM",
        config={**{f"bskcn_{number}": [9] for number in range(1, 5)}, "bskcn_tv": [0.9, 0.8]},
        words=_WORDS,
    ),
    _of_vllm_alone("MiMoForCausalLM"),
    _of_vllm_alone(
        "TeleChat2ForCausalLM",
        config={
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 192,
            "n_embed": 128,
            "ffn_hidden_size": 192,
            "layer_norm_epsilon": 1e-5,
        },
        words=_WORDS,
    ),
    _of_vllm_alone("TeleFLMForCausalLM", config={"use_mup": False}),
    _of_vllm_alone("PanguEmbeddedForCausalLM", config={"bias": False}),
    _of_vllm_alone("IQuestCoderForCausalLM", words=_WORDS),
    _of_vllm_alone(
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

ARCHITECTURES = (*_TRANSFORMERS, *_VLLM_ALONE)
BY_NAME = {one.name: one for one in (*ARCHITECTURES, *MLA)}
