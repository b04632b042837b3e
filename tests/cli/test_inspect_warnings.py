"""`inspect` and `why` with `--base-model`: another base model than the adapter names is a warning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.common import Cli
from tests.make import LAYER, PEFT, adapter_files, put

SAID = "trained on Qwen/Qwen2.5-7B, served on Qwen/Qwen2.5-Coder-7B: another name (plain, not coder)"


@pytest.fixture
def coder(cli: Cli) -> Path:
    return put(cli.adapters / "plain", adapter_files(base_model_name_or_path="Qwen/Qwen2.5-7B"))


def test_inspect_warns_of_another_name(cli: Cli, coder: Path) -> None:
    asked = ("inspect", coder, "--base-model", "Qwen/Qwen2.5-Coder-7B")
    assert f"warning      {SAID}" in cli(*asked).out.splitlines()
    assert cli(*asked, "--json").only["warnings"] == [SAID]
    assert cli("inspect", coder, "--json").only["warnings"] == []
    assert cli("inspect", coder, "--base-model", "unsloth/Qwen2.5-7B-bnb-4bit", "--json").only["warnings"] == []


def test_inspect_reads_the_name_of_a_local_model(cli: Cli, coder: Path) -> None:
    model = cli.root / "base"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen2.5-Coder-7B"}))
    assert cli("inspect", coder, "--base-model", model, "--json").only["warnings"] == [SAID]


def test_an_alias_ends_the_warning(cli: Cli, coder: Path) -> None:
    cli.env["LORA_PLUGINS_BASE_ALIASES"] = "Qwen/Qwen2.5-7B"
    assert cli("inspect", coder, "--base-model", "Qwen/Qwen2.5-Coder-7B", "--json").only["warnings"] == []


def test_inspect_names_what_is_beside_a_and_b(cli: Cli) -> None:
    adapter = put(cli.adapters / "biased", adapter_files(bias="lora_only", use_rslora=True))
    assert "rank         4, alpha 8, rsLoRA, bias" in cli("inspect", adapter).out.splitlines()


def test_inspect_names_ia3s_factors_and_no_rank(cli: Cli) -> None:
    config = {"peft_type": "IA3", "target_modules": ["k_proj"], "r": ..., "lora_alpha": ...}
    factors = {f"{PEFT}{LAYER.format(layer, 'k_proj')}.ia3_l": np.ones((4, 1), "float32") for layer in range(2)}
    adapter = put(cli.adapters / "ia3", adapter_files(factors, **config))
    assert {"rank         none, by peft_type IA3", "beside       2 k_proj.ia3_l"} < set(
        cli("inspect", adapter).out.splitlines()
    )
    assert cli("inspect", adapter, "--json").only["beside"] == [
        {"module": LAYER.format(layer, "k_proj"), "tensor": "ia3_l", "shape": [4, 1], "dtype": "F32"}
        for layer in range(2)
    ]
