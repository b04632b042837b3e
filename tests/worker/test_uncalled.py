"""What vLLM wraps and never calls takes no adapter: it computes with the raw layer or its weight (vllm#48974)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, Unadapted
from lora_plugins.scheduler.messages import Failed
from lora_plugins.worker.model_description import describe
from tests.worker.real_models import CONFIGS, tensors_for, write_adapter
from tests.worker.small_model import bring

KV_B = "model.layers.0.self_attn.kv_b_proj"
RANK = 4


def uncalled(modules: ModelModules) -> set[str]:
    return {name for name, why in modules.unadapted.items() if why is Unadapted.UNCALLED}


def test_kv_b_proj_is_wrapped_and_takes_no_adapter(make_real_manager: Any) -> None:
    manager = make_real_manager("deepseek-v2")
    modules = describe(manager._adapter_manager)
    assert KV_B in manager._adapter_manager.modules
    assert uncalled(modules) == {KV_B}
    assert {name.rpartition(".")[2] for name in modules.places} == {
        "q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_a_worker_refuses_an_adapter_of_it(
    make_real_manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_real_manager("deepseek-v2")
    modules = describe(manager._adapter_manager)
    rest = tensors_for(modules, ExpertFormat.PER_EXPERT, RANK)
    place = manager._adapter_manager.modules[KV_B]
    sizes = (RANK, place.base_layer.input_size), (place.base_layer.output_size, RANK)
    pair = {
        f"base_model.model.{KV_B}.lora_{side}.weight": next(iter(rest.values())).new_ones(size)
        for side, size in zip("AB", sizes, strict=True)
    }
    assert not isinstance(bring(manager, write_adapter(tmp_path / "rest", 1, rest, RANK)), Failed)
    failed = bring(manager, write_adapter(tmp_path / "all", 2, {**rest, **pair}, RANK))
    assert isinstance(failed, Failed)
    assert f"never computes with an adapter, such as '{KV_B}'" in str(failed)
    monkeypatch.setenv("LORA_PLUGINS_UNMATCHED", "warn")
    warning = make_real_manager("deepseek-v2")
    assert not isinstance(bring(warning, write_adapter(tmp_path / "warn", 3, {**rest, **pair}, RANK)), Failed)
    assert isinstance(bring(warning, write_adapter(tmp_path / "alone", 4, pair, RANK)), Failed)


def test_each_worker_of_two_says_so(make_real_manager: Any) -> None:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    manager = make_real_manager("deepseek-v2", parallel=two)
    assert uncalled(describe(manager._adapter_manager)) == {KV_B}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"deepseek-v2", "idefics3", "paligemma", "whisper"}))
def test_models_that_call_every_module_keep_all(make_real_manager: Any, name: str) -> None:
    assert uncalled(describe(make_real_manager(name)._adapter_manager)) == set()
