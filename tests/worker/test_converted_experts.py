"""Converted experts fill vLLM's slots as vLLM's own conversion does, and compute what PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.layouts.writing import tensors_of, write_weights
from lora_plugins.adapter.model_modules import ExpertFormat
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.vllm_patches.engine_modules import model_of
from lora_plugins.worker.model_description import describe
from tests.worker.real_models import (
    configuration,
    held_in,
    manager_of,
    tensors_for,
    write_adapter,
)
from tests.worker.small_model import Adapter, Make, slots_of

RANK = 4


def convert(original: Path, target: Path, manager: Any) -> dict[str, torch.Tensor]:
    """The adapter in the form of this manager's model, written to `target`; its tensors."""
    modules = describe(manager._adapter_manager)
    base = BaseModel("base", model=model_of(modules))
    conversion = verify_adapter(original, base, Settings(base_match=BaseMatch.OFF)).conversion
    assert conversion is not None
    target.mkdir()
    file = "adapter_model.safetensors"
    write_weights(tensors_of(conversion), lambda _: original / file, target / file, lambda _: None)
    (target / "adapter_config.json").write_bytes(canonical_bytes(conversion.config))
    return load_file(target / file)


@pytest.mark.parametrize(("name", "block"), [("qwen3-moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_slots_hold_what_vllms_own_conversion_writes(base: Path, tmp_path: Path, name: str, block: str) -> None:
    """The reference is vLLM with `--enable-mixed-moe-lora-format`, which converts in memory."""
    mixed = manager_of(configuration(tmp_path, name, enable_mixed_moe_lora_format=True), LRUCacheWorkerLoRAManager)
    plain = manager_of(configuration(tmp_path, name), LRUCacheWorkerLoRAManager)
    experts = describe(plain._adapter_manager).experts[f"model.layers.0.{block}.experts"]
    assert experts.formats == (ExpertFormat.PER_EXPERT,)
    tensors = tensors_for(describe(mixed._adapter_manager), ExpertFormat.STACKED, RANK)
    mixed.add_adapter(write_adapter(tmp_path / "original", 7, tensors, RANK, is_3d=True).request())
    # As Transformers 5 names them, which is not how vLLM names Mixtral's.
    renamed = {key.replace(block, "mlp"): tensor for key, tensor in tensors.items()}
    write_adapter(tmp_path / "renamed", 7, renamed, RANK)
    convert(tmp_path / "renamed", tmp_path / "converted", plain)
    plain.add_adapter(Adapter(7, tmp_path / "converted", {}, {}).request())
    wanted, found = (held_in(one, slots_of(one).index(7)) for one in (mixed, plain))
    assert found.keys() == wanted.keys()
    assert [place for place in wanted if not torch.equal(found[place], wanted[place])] == []
    assert all(wanted[place].any() for place in wanted), "the adapter fills every module"


@pytest.mark.parametrize(
    ("of", "block", "parts"),
    [
        ("qwen3-moe", "layers.0.mlp.experts", {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}),
        ("nemotron-h", "layers.0.mixer.experts", {"up_proj": ["up_proj"], "down_proj": ["down_proj"]}),  # no gate_proj
    ],
)
def test_each_expert_computes_what_peft_computes(
    make_real_manager: Make, tmp_path: Path, of: str, block: str, parts: Any
) -> None:
    """An adapter that PEFT saves of Transformers 5's stacked parameters."""
    import transformers
    from peft import LoraConfig, get_peft_model

    plain = make_real_manager(of, LRUCacheWorkerLoRAManager)
    config = json.loads((tmp_path / of / "config.json").read_text())
    config.pop("architectures")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    parameters = [f"experts.{name}" for name in parts]
    peft = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=12, target_modules=["q_proj"], target_parameters=parameters)
    )
    for key, parameter in peft.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(str(tmp_path / "peft"))
    made = convert(tmp_path / "peft", tmp_path / "converted", plain)
    outer = peft.base_model.model.get_submodule(f"model.{block}")
    deltas = {wrapper.parameter_name: wrapper.get_delta_weight("default") for wrapper in (outer, outer.base_layer)}
    for expert in range(describe(plain._adapter_manager).experts[f"model.{block}"].count):
        prefix = f"base_model.model.model.{block}.{expert}"
        for parameter, names in parts.items():
            ours = [
                3 * made[f"{prefix}.{name}.lora_B.weight"] @ made[f"{prefix}.{name}.lora_A.weight"] for name in names
            ]
            torch.testing.assert_close(torch.cat(ours), deltas[parameter][expert])
