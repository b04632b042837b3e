"""Where answers are out, `compare` names what is at fault; PEFT answers in the place of a server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.cli.at_fault import ByPeft, Trained, apart, at_fault
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter, build_base
from testbed.mutants import FAULTS, LAYERS, Adapter, read, write

PROMPTS = ("The quick brown fox jumps over", "SELECT name FROM orders")
RIGHT = 1e-4  # of float32
World = tuple[Path, ByPeft, list[Trained]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("at-fault")
    base = build_base(home / "base", hidden=64, layers=LAYERS)
    directory = build_adapter(base, home, AdapterSpec("all", 4, (*ATTENTION, *MLP)))
    model = ByPeft(directory, None)
    return directory, model, [*map(model.trained, PROMPTS)]


def answers(directory: Path, trained: list[Trained]) -> list[list[float]]:
    model = ByPeft(directory, None)
    return [model.logprobs(one.token_ids) for one in trained]


def said(world: World, changed: Adapter | None, directory: Path) -> str:
    _, model, trained = world
    assert changed is not None
    # Else PEFT gives what is missing in the file the random weights of `init_lora_weights: false`.
    write(Adapter(changed.tensors, {**changed.config, "init_lora_weights": True}), directory)
    return at_fault(trained, answers(directory, trained), RIGHT, model)


@pytest.mark.parametrize(
    ("gone", "text"),
    [
        (["q_proj"], "`q_proj` of all layers"),
        (["up_proj"], "`up_proj` of all layers"),
        ([".layers.1."], "layer 1"),
        ([f".layers.{layer}." for layer in (1, 2, 3)], "the last 3 layers"),
        (["layers.3.mlp.down_proj"], "`model.layers.3.mlp.down_proj`"),
    ],
)
def test_modules_that_are_missing_are_named(world: World, tmp_path: Path, gone: list[str], text: str) -> None:
    adapter = read(world[0])
    tensors = {name: one for name, one in adapter.tensors.items() if not any(part in name for part in gone)}
    changed = Adapter(tensors, adapter.config)
    assert said(world, changed, tmp_path / "x") == f"at fault: served as if missing: {text}"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("alpha doubled", "alpha were doubled"),
        ("alpha of the wrong sign", "alpha had the other sign"),
        ("rsLoRA flipped", "alpha were doubled"),  # which is the same at rank 4
        ("B zero in all modules", "the whole adapter were missing"),
    ],
)
def test_a_scaling_of_all_is_named(world: World, tmp_path: Path, fault: str, text: str) -> None:
    changed = FAULTS[fault](read(world[0]), random.Random(0))
    assert said(world, changed, tmp_path / "x") == f"at fault: served as if {text}"


def test_what_no_omission_explains_is_not_called_missing(world: World, tmp_path: Path) -> None:
    line = said(world, FAULTS["layers permuted"](read(world[0]), random.Random(0)), tmp_path / "x")
    assert "missing" not in line


def test_answers_that_are_not_finite_are_said(world: World) -> None:
    _, model, trained = world
    served = [[float("nan")] * (len(one.token_ids) - 1) for one in trained]
    assert at_fault(trained, served, RIGHT, model) == "at fault: the server's answers are not finite"


def test_the_model_answers_as_before_afterwards(world: World) -> None:
    _, model, trained = world
    with model.scaled(dict.fromkeys(model.ranks, 0.0)):
        assert model.logprobs(trained[0].token_ids) == pytest.approx(trained[0].base_logprobs, abs=RIGHT)
    assert model.logprobs(trained[0].token_ids) == trained[0].logprobs


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
ALL: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
IA3: dict[str, Any] = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


@pytest.fixture(scope="module")
def with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose attention has biases, and its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    home = tmp_path_factory.mktemp("with-biases") / "base"
    torch.manual_seed(1)
    build_base(home, hidden=64, layers=2)  # for the tokenizer
    words = json.loads((home / "config.json").read_text())["vocab_size"]
    Qwen2ForCausalLM(Qwen2Config(vocab_size=words, num_hidden_layers=2, **TINY)).save_pretrained(home)
    return home


def trained_by_peft(base: Path, directory: Path, config: Any) -> ByPeft:
    """An adapter of PEFT's own, with noise in whatever it trains."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return ByPeft(directory, None)


@pytest.mark.parametrize(
    ("kind", "keys", "text"),
    [
        ("LoraConfig", {**ALL, "use_dora": True}, "DoRA's magnitudes"),
        ("LoraConfig", {**ALL, "lora_bias": True}, "the biases of B"),
        ("LoraConfig", {**ALL, "bias": "all"}, "the trained biases"),
        ("LoraConfig", {**ALL, "trainable_token_indices": [*range(60)]}, "the trained tokens"),
    ],
    ids=["DoRA", "lora_bias", "bias", "tokens"],
)
def test_a_kind_that_is_missing_is_named(
    with_biases: Path, tmp_path: Path, kind: str, keys: dict[str, Any], text: str
) -> None:
    """An engine that knows A and B alone."""
    import peft

    model = trained_by_peft(with_biases, tmp_path / "adapter", getattr(peft, kind)(**keys, task_type="CAUSAL_LM"))
    trained = [*map(model.trained, PROMPTS)]
    adapter = read(tmp_path / "adapter")
    plain = {name: one for name, one in adapter.tensors.items() if name.endswith((".lora_A.weight", ".lora_B.weight"))}
    off = {"use_dora": False, "lora_bias": False, "bias": "none", "trainable_token_indices": None}
    write(Adapter(plain, {**adapter.config, **off}), tmp_path / "plain")
    assert (
        at_fault(trained, answers(tmp_path / "plain", trained), RIGHT, model)
        == f"at fault: served as if {text} were missing"
    )


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("LoraConfig", {**ALL, "use_dora": True, "bias": "all"}),
        ("LoraConfig", {**ALL, "trainable_token_indices": [*range(60)]}),
        ("IA3Config", IA3),
    ],
    ids=["DoRA and bias", "tokens", "IA3"],
)
def test_the_base_models_answers_have_nothing_of_the_adapter(
    with_biases: Path, tmp_path: Path, kind: str, keys: dict[str, Any]
) -> None:
    """PEFT leaves trained biases in the base model; a floor with them would let any answer pass."""
    import peft

    model = trained_by_peft(with_biases, tmp_path / "adapter", getattr(peft, kind)(**keys, task_type="CAUSAL_LM"))
    (one,) = map(model.trained, PROMPTS[:1])
    base = ByPeft(tmp_path / "adapter", None)
    from transformers import AutoModelForCausalLM

    base._model = AutoModelForCausalLM.from_pretrained(with_biases).eval()
    wanted = base.logprobs(one.token_ids)
    assert one.base_logprobs == pytest.approx(wanted, abs=RIGHT)
    assert max(apart(one.logprobs, wanted)) > 100 * RIGHT
    assert at_fault([one], [wanted], RIGHT, model) == "at fault: served as if the whole adapter were missing"
    assert model.logprobs(one.token_ids) == one.logprobs, "as before"


def test_a_module_without_its_factors_is_named(with_biases: Path, tmp_path: Path) -> None:
    from peft import IA3Config

    model = trained_by_peft(with_biases, tmp_path / "adapter", IA3Config(**IA3, task_type="CAUSAL_LM"))
    trained = [*map(model.trained, PROMPTS)]
    adapter = read(tmp_path / "adapter")
    ones = {name: torch.ones_like(one) if "k_proj" in name else one for name, one in adapter.tensors.items()}
    write(Adapter(ones, adapter.config), tmp_path / "less")
    assert (
        at_fault(trained, answers(tmp_path / "less", trained), RIGHT, model)
        == "at fault: served as if missing: `k_proj` of all layers"
    )
