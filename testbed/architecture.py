"""One row of `testbed.architectures`: a tiny model, and what of it adapters can be for."""

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
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
# The list of most recipes, whatever the model has of these names: PEFT passes over what the model has not.
_USUAL = (*QKVO, "gate_proj", "up_proj", "down_proj")


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
        variant: what distinguishes it from another row of this name.
        pooled: what requests of a model that generates nothing get: the embedding of the `first` or `last` token, or
            the probabilities of `labels`.
        dtype: that the engine computes in.
        is_computed: whether the engine runs; otherwise the model is only made.
        is_quick: whether it is in the normal test run.
        tied: whether only adapters of the weights that embeddings and head share are made.
        hears: whether a request is an audio (`testbed.speech`), which a tower of the model sees.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = QKVO
    words: tuple[str, ...] = ()
    router: str = ""
    vllms_router: str = ""
    only_made: tuple[str, ...] = ("experts",)
    more: tuple[str, ...] = ()
    has_peft: bool = True
    is_peft_right: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    pooled: str = ""
    dtype: str = "float32"
    is_computed: bool = True
    is_quick: bool = False
    tied: bool = False
    hears: bool = False

    @property
    def label(self) -> str:
        """The name of the row."""
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of its config.json."""
        if not self.is_wrapper:
            return {key: value for key, value in {**_SMALL, **self.config}.items() if value is not ...}
        text = {**_SMALL, **self.config["text_config"]}
        return {**self.config, "text_config": {key: value for key, value in text.items() if value is not ...}}

    @property
    def is_wrapper(self) -> bool:
        """Whether it is a text model below a multimodal one, of which the engine runs the text model alone."""
        return "text_config" in self.config

    @property
    def only(self) -> tuple[str, ...]:
        """What the engine adapts, where it is not everything."""
        if not self.router:
            return ()
        return (*self.attention, (self.vllms_router or self.router).rpartition(".")[2], *self.more, *self.words)

    def computes(self, kind: str) -> bool:
        """Whether the engine answers with adapters of this kind; the base model is the kind ""."""
        return self.is_computed and kind not in self.only_made

    def kinds(self) -> dict[str, dict[str, Any]]:
        """Kinds of adapters, with the arguments of PEFT's `LoraConfig`."""
        if self.tied:
            return {
                "embeddings": {"target_modules": list(EMBEDDINGS)},
                "embeddings-head": {"target_modules": list(WORDS)},
                "tied": {"target_modules": list(EMBEDDINGS), "ensure_weight_tying": True},
            }
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


WORDS = ("embed_tokens", "lm_head")
EMBEDDINGS = ("embed_tokens",)
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_d_ssm": 128}
EXPERTS_KINDS = ("experts", "all-linear", "usual")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}


def of_vllm_alone(name: str, attention: tuple[str, ...] = QKVO, **values: Any) -> Architecture:
    """One without a class of its name in Transformers, with a configuration much like Llama's."""
    return Architecture(name, "llama", attention=attention, has_peft=False, **values)
