"""What is read off the served model: names, largest rank, and the shapes of real models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.server.base_model import describe_base, module_shapes
from lora_plugins.settings import Settings


def llama(**changes):
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**{**sizes, "architectures": ["LlamaForCausalLM"], **changes})


def test_shapes_of_a_llama():
    shapes = module_shapes(llama())
    layer = "model.layers.1."
    assert shapes == {
        "model.embed_tokens": (96, 16),
        "lm_head": (16, 96),
        **{
            f"model.layers.{number}.{part}": shape
            for number in range(2)
            for part, shape in {
                "self_attn.q_proj": (16, 16),
                "self_attn.k_proj": (16, 8),
                "self_attn.v_proj": (16, 8),
                "self_attn.o_proj": (16, 16),
                "mlp.gate_proj": (16, 40),
                "mlp.up_proj": (16, 40),
                "mlp.down_proj": (40, 16),
            }.items()
        },
    }
    assert layer + "self_attn.k_proj" in shapes


def test_shapes_of_a_gpt2_whose_linear_layers_are_conv1d():
    from transformers import GPT2Config

    shapes = module_shapes(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=96, n_positions=32, architectures=["GPT2LMHeadModel"])
    )
    assert shapes["transformer.h.0.attn.c_attn"] == (16, 48)
    assert shapes["transformer.h.0.attn.c_proj"] == (16, 16)
    assert shapes["transformer.h.0.mlp.c_fc"] == (16, 64)
    assert shapes["transformer.h.0.mlp.c_proj"] == (64, 16)
    assert shapes["transformer.wte"] == (96, 16)


def test_shapes_leave_the_servers_configuration_alone():
    # Building a model writes, among others, the attention implementation into its configuration.
    config = llama()
    before = copy.deepcopy(vars(config))
    module_shapes(config)
    assert vars(config) == before


@pytest.mark.parametrize(
    ("architectures", "says"),
    [(["NoSuchForCausalLM"], "NoSuchForCausalLM"), (None, "unnamed"), (["LlamaTokenizer"], "cannot be built")],
)
def test_an_unknown_architecture_has_no_shapes_and_says_so(logged, architectures, says):
    assert module_shapes(llama(architectures=architectures)) == {}
    (record,) = [record for record in logged.records if record.name == "vllm.lora_plugins"]
    assert record.levelname == "WARNING"
    assert says in record.getMessage()


def test_a_configuration_that_builds_no_model_logs_a_warning(logged):
    assert module_shapes(llama(hidden_act="no_such_function")) == {}
    assert "Shapes are not checked" in logged.text


def served(lora_config: object) -> SimpleNamespace:
    """What `describe_base` reads off vLLM's OpenAIServingModels."""
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora_config)),
        model_config=SimpleNamespace(model="org/tiny", hf_config=llama()),
        base_model_paths=[SimpleNamespace(name="tiny"), SimpleNamespace(name="tiny-2")],
    )


def test_the_base_model_is_read_off_the_server():
    base = describe_base(served(SimpleNamespace(max_lora_rank=64)), Settings(base_aliases=("alias",)))
    assert (base.path, base.served_names, base.aliases) == ("org/tiny", ("tiny", "tiny-2"), ("alias",))
    assert (base.max_rank, base.lora_enabled) == (64, True)
    assert base.module_shapes["lm_head"] == (16, 96)


def test_a_server_without_lora_is_seen():
    base = describe_base(served(None), Settings())
    assert isinstance(base, BaseModel)
    assert (base.max_rank, base.lora_enabled) == (None, False)
