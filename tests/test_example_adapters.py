"""The adapters of `examples/adapters`: small, for their base by name, and with the log of their training."""

from __future__ import annotations

import json

from safetensors.torch import load_file

from examples.training.__main__ import ADAPTERS
from examples.training.recipes import BASE_NAME, BY_NAME

SHIPPED = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())


def test_the_shipped_adapters_are_those_of_recipes() -> None:
    assert sorted(set(BY_NAME) - {"robot"}) == SHIPPED  # the demo trains one


def test_shipped_adapters_are_small() -> None:
    sizes = [(ADAPTERS / name / "adapter_model.safetensors").stat().st_size for name in SHIPPED]
    assert max(sizes) <= 1_000_000
    assert sum(sizes) <= 7_000_000


def test_each_shipped_adapter_names_its_base_and_learned() -> None:
    for name in SHIPPED:
        config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
        training = json.loads((ADAPTERS / name / "training.json").read_text())
        assert config["base_model_name_or_path"] == BASE_NAME
        assert BY_NAME[name].trainer in training["packages"]
        assert training["pairs"] == len(BY_NAME[name].pairs())
        assert training["losses"][-1] < training["losses"][0] / 4


def test_three_trainers_have_trained_shipped_adapters() -> None:
    assert {BY_NAME[name].trainer for name in SHIPPED} == {"peft", "trl", "llamafactory"}


def test_a_shipped_adapter_adapts_the_embeddings() -> None:
    trained = load_file(ADAPTERS / "crier" / "adapter_model.safetensors")
    module = "base_model.model.model.embed_tokens"
    a, b = (trained[f"{module}.lora_embedding_{side}"] for side in "AB")
    assert (a.shape[0], a.count_nonzero() > 0, b.count_nonzero() > 0) == (1, True, True)
