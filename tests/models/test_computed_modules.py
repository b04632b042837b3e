"""Modules that vLLM wraps and no request calls are exactly those described as uncalled, and take no adapter."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from lora_plugins.adapter.model_modules import ModelModules, Unadapted
from testbed.architectures import ARCHITECTURES, BY_NAME, MLA, Architecture
from testbed.forked_engines import ForkedEngines
from testbed.matrix import same
from testbed.recent_architectures import TURNED


def rows(architectures: tuple[Architecture, ...], quick: Collection[str]) -> list[object]:
    return [
        pytest.param(one, id=one.label, marks=[] if one.label in quick else [pytest.mark.nightly])
        for one in architectures
    ]


UNCALLED = {one.label: {"kv_b_proj"} for one in MLA} | {
    name: {"conv1d"} for name in ("FalconH1ForCausalLM", "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM")
}
COMPUTED = tuple(one for one in ARCHITECTURES if one.is_computed)
QUICK = MLA[0].name, "OlmoeForCausalLM"


@pytest.mark.parametrize("architecture", rows((*MLA, *COMPUTED), QUICK))
def test_what_is_never_called_is_described(engines: ForkedEngines, architecture: Architecture, tmp_path: Path) -> None:
    with engines.engine(architecture, tmp_path) as engine:
        engine.call("build")
        modules = ModelModules.of_plain(engine.call("start"))
        never_called = engine.call("never_called")
    uncalled = {name for name, why in modules.unadapted.items() if why is Unadapted.UNCALLED}
    assert set(never_called) == uncalled
    assert {name.rpartition(".")[2] for name in uncalled} == UNCALLED.get(architecture.label, set())


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", MLA, ids=lambda one: one.label)
def test_an_adapter_without_effect_in_vllm_is_refused(
    engines: ForkedEngines, architecture: Architecture, tmp_path: Path
) -> None:
    with engines.engine(architecture, tmp_path, with_plugins=False) as engine:
        engine.call("build")
        engine.call("start")
        base, kv_b, all_linear = engine.call("prompt_logprobs", ["attention", "all-linear"])
    assert kv_b == base  # vLLM takes the adapter, and computes nothing of it
    assert all_linear != base
    with engines.engine(architecture, tmp_path) as engine:
        engine.call("start")
        refused, vllm, _ = engine.call("verdict", "attention")
        assert vllm == ""
        assert "2 of 2 modules that this engine never computes with an adapter" in refused
        assert "model.layers.0.self_attn.kv_b_proj" in refused
        refused, _, _ = engine.call("verdict", "all-linear")
        assert re.search(r"found 2 of \d+ modules that this engine never computes with an adapter", refused)
        assert "LORA_PLUGINS_UNMATCHED=warn" in refused


@pytest.mark.nightly
def test_an_adapter_of_turned_rows_is_refused(engines: ForkedEngines, tmp_path: Path) -> None:
    """vLLM turns the rows of Llama 4's queries and keys as it loads them, and takes an adapter's as they are."""
    with engines.engine(TURNED, tmp_path, with_plugins=False) as engine:
        right = engine.call("build")
        engine.call("start")
        found = engine.call("answers", ["attention"])
    assert same(found[""], right[""])
    assert not same(found["attention"], right["attention"])
    with engines.engine(TURNED, tmp_path) as engine:
        engine.call("start")
        refused, vllm, _ = engine.call("verdict", "attention")
    assert vllm == ""
    assert "4 of 4 modules that this engine turns or scales" in refused


@pytest.mark.nightly
def test_a_bias_of_ernies_router_has_no_effect_in_vllm(engines: ForkedEngines, tmp_path: Path) -> None:
    """vLLM's router for CPUs leaves it out, without any adapter too: why the row's bias is 0, for PEFT to be right."""
    import torch
    from safetensors.torch import load_file, save_file

    ernie = BY_NAME["Ernie4_5_MoeForCausalLM"]
    found = []
    for chosen in (None, [0, 1], [2, 3]):
        with engines.engine(ernie, tmp_path, with_plugins=False) as engine:
            if chosen is None:
                engine.call("build")
            else:
                weights = load_file(file := tmp_path / "base" / "model.safetensors")
                biases = [name for name in weights if name.endswith("moe_statics.e_score_correction_bias")]
                assert len(biases) == 2
                bias = torch.zeros(1, 4).index_fill_(1, torch.tensor(chosen), 2.0)  # more than any probability
                save_file(weights | {name: bias.clone() for name in biases}, file, {"format": "pt"})
            engine.call("start")
            found += engine.call("prompt_logprobs", [])
    assert found[0] == found[1] == found[2]
