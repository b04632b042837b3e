"""What vLLM's own models have and an engine does not adapt is named with the reason, and refused with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, Unadapted
from lora_plugins.scheduler.messages import Loaded
from lora_plugins.vllm_patches import wrapping
from lora_plugins.vllm_patches.worker import adapter_rows
from lora_plugins.worker.model_description import describe
from tests.vllm_patches.put_back import put_back
from tests.worker.real_models import CONFIGS, tensors_for, unlike_vllms, write_adapter
from tests.worker.small_model import Make, bring, failure

RANK = 4
TOWER = {"enable_tower_connector_lora": True}


@pytest.fixture
def unadapted(make_real_manager: Make) -> Callable[..., dict[str, Unadapted]]:
    def of(name: str, **lora: Any) -> dict[str, Unadapted]:
        manager = make_real_manager(name, LRUCacheWorkerLoRAManager, **lora)
        return dict(describe(manager._adapter_manager).unadapted)

    return of


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM asks of a processor, which needs a tokenizer: how many tokens an image has."""
    budget = SimpleNamespace(
        mm_max_items_per_prompt={"image": 1}, mm_max_toks_per_item={"image": 4}, get_encoder_budget=lambda: 4
    )
    monkeypatch.setattr("vllm.lora.model_manager.MultiModalBudget", lambda *_: budget)


VISION = "vision_tower.vision_model.encoder.layers.0."


def test_towers_need_a_flag_and_other_kinds_cannot(unadapted: Any) -> None:
    found = unadapted("paligemma")
    needs_flag = {name for name, why in found.items() if why is Unadapted.TOWER}
    parts = ("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    assert needs_flag == {VISION + part for part in (*parts, "mlp.fc1", "mlp.fc2")}
    # vLLM has it as torch's own linear layer, and gives no name of this model's embeddings.
    assert found["multi_modal_projector.linear"] is Unadapted.KIND
    assert found["language_model.model.embed_tokens"] is Unadapted.KIND


def test_connectors_need_the_flag_too(unadapted: Any) -> None:
    found = unadapted("idefics3")
    assert found["model.connector.modality_projection.proj"] is Unadapted.TOWER
    assert found["model.vision_model.encoder.layers.0.mlp.fc1"] is Unadapted.TOWER


ENCODED = {
    *(f"model.encoder.layers.0.self_attn.{part}" for part in ("qkv_proj", "q_proj", "k_proj", "v_proj", "out_proj")),
    *(f"model.encoder.layers.0.mlp.{part}" for part in ("fc1", "fc2")),
    *(f"model.decoder.layers.0.encoder_attn.{part}" for part in ("kv_proj", "k_proj", "v_proj")),
}


@pytest.fixture
def parts_patched() -> Iterator[None]:
    with put_back(LoRAModelManager):
        adapter_rows.patch()
        yield


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own methods, whatever a test of another file has patched in this process."""
    for name, method in list(vars(LoRAModelManager).items()):
        if hasattr(method, wrapping._OURS):
            monkeypatch.setattr(LoRAModelManager, name, method.__wrapped__)


@pytest.mark.usefixtures("unpatched")
def test_vllm_itself_computes_encoded_frames_with_the_adapters_of_tokens(make_real_manager: Make) -> None:
    """Where this fails, vLLM has a mapping for Whisper, and `adapter_rows._init_punica_wrapper` could go."""
    manager = make_real_manager("whisper", LRUCacheWorkerLoRAManager)._adapter_manager
    of_frames = manager.modules["model.encoder.layers.0.mlp.fc1"]
    assert of_frames.punica_wrapper is manager.modules["model.decoder.layers.0.mlp.fc1"].punica_wrapper


@pytest.mark.usefixtures("parts_patched")
def test_an_encoder_and_what_attends_to_it_need_the_flag(unadapted: Any, make_real_manager: Make) -> None:
    found = unadapted("whisper")
    assert {name for name, why in found.items() if why is Unadapted.TOWER} == ENCODED
    places = set(describe(make_real_manager("whisper")._adapter_manager).places)
    cross = "model.decoder.layers.0.encoder_attn."
    assert {name for name in places if name.startswith(cross)} == {f"{cross}q_proj", f"{cross}out_proj"}


@pytest.mark.usefixtures("parts_patched", "small_budget")
def test_with_the_flag_encoded_frames_have_their_own_rows(make_real_manager: Make) -> None:
    manager = make_real_manager("whisper", LRUCacheWorkerLoRAManager, **TOWER)._adapter_manager
    wrappers = manager.punica_wrapper_mapping
    assert describe(manager).unadapted.keys().isdisjoint(ENCODED)
    parts = {"model.encoder.": "model.encoder", "model.decoder.": "model.decoder"}
    for name, module in manager.modules.items():
        part = next(part for start, part in parts.items() if name.startswith(start))
        assert module.punica_wrapper is wrappers[name if name.endswith(".kv_proj") else part]
    assert len({id(wrapper) for wrapper in wrappers.values()}) == 3


@pytest.mark.usefixtures("parts_patched")
def test_a_connector_has_not_the_rows_around_it(make_real_manager: Make) -> None:
    manager = make_real_manager("idefics3", LRUCacheWorkerLoRAManager)._adapter_manager
    manager.mm_mapping.connector = ["model.text_model.layers.0.mlp"]
    assert manager._get_punica_wrapper("model.text_model.layers.0.mlp.down_proj") is None
    assert manager._get_punica_wrapper("model.text_model.layers.0.self_attn.o_proj") is not None


@pytest.mark.usefixtures("small_budget")
def test_with_the_flag_nothing_of_the_tower_is_left(unadapted: Any) -> None:
    assert Unadapted.TOWER not in unadapted("idefics3", **TOWER).values()


def test_what_target_modules_leave_out_is_named(unadapted: Any) -> None:
    found = unadapted("qwen3-moe", target_modules=["o_proj", "model.layers.0.mlp.gate"])
    layer = "model.layers.0."
    left_out = {name for name, why in found.items() if why is Unadapted.TARGET}
    parts = ("qkv_proj", "q_proj", "k_proj", "v_proj")
    assert left_out == {f"{layer}self_attn.{part}" for part in parts} | {
        f"{layer}mlp.experts", "model.embed_tokens", "lm_head"
    }  # fmt: skip


def test_a_head_that_the_model_does_not_adapt_is_named(unadapted: Any) -> None:
    assert unadapted("gpt-oss") == {"lm_head": Unadapted.KIND, "model.embedding": Unadapted.KIND}


def test_an_adapter_of_a_tower_is_refused_with_the_flag(make_real_manager: Make, tmp_path: Path) -> None:
    manager = make_real_manager("idefics3")
    tower = "base_model.model.model.vision_model.encoder.layers.0.mlp.fc1"
    tensors = tensors_for(describe(manager._adapter_manager), ExpertFormat.PER_EXPERT, RANK)
    tensors |= {f"{tower}.lora_A.weight": torch.ones(RANK, 64), f"{tower}.lora_B.weight": torch.ones(32, RANK)}
    error = failure(manager, write_adapter(tmp_path / "a", 1, tensors, RANK))
    assert "1 of 8 modules of the multimodal tower or connector" in error.found
    assert error.remedy.startswith("restart the server with --enable-tower-connector-lora")


@pytest.mark.usefixtures("small_budget")
def test_with_the_flag_slots_of_the_tower_hold_it(make_real_manager: Make, tmp_path: Path) -> None:
    ours = make_real_manager("idefics3", **TOWER)
    vllms = make_real_manager("idefics3", LRUCacheWorkerLoRAManager, **TOWER)
    modules = describe(ours._adapter_manager)
    assert {name.split(".")[1] for name in modules.places} == {"vision_model", "text_model", "connector"}
    adapter = write_adapter(tmp_path / "a", 7, tensors_for(modules, ExpertFormat.PER_EXPERT, RANK), RANK)
    assert unlike_vllms(ours, vllms, adapter) == []


# --- what vLLM wraps and never calls: it computes with the raw layer or its weight (vllm#48974) ---

KV_B = "model.layers.0.self_attn.kv_b_proj"


def uncalled(modules: ModelModules) -> set[str]:
    return {name for name, why in modules.unadapted.items() if why is Unadapted.UNCALLED}


def test_kv_b_proj_is_wrapped_and_takes_no_adapter(make_real_manager: Make) -> None:
    manager = make_real_manager("deepseek-v2")
    modules = describe(manager._adapter_manager)
    assert KV_B in manager._adapter_manager.modules
    assert uncalled(modules) == {KV_B}
    assert {name.rpartition(".")[2] for name in modules.places} == {
        "q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_a_worker_refuses_an_adapter_of_it(
    make_real_manager: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert isinstance(bring(manager, write_adapter(tmp_path / "rest", 1, rest, RANK)), Loaded)
    error = failure(manager, write_adapter(tmp_path / "all", 2, {**rest, **pair}, RANK))
    assert f"never computes with an adapter, such as '{KV_B}'" in str(error)
    monkeypatch.setenv("LORA_PLUGINS_UNMATCHED", "warn")
    warning = make_real_manager("deepseek-v2")
    assert isinstance(bring(warning, write_adapter(tmp_path / "warn", 3, {**rest, **pair}, RANK)), Loaded)
    failure(warning, write_adapter(tmp_path / "alone", 4, pair, RANK))


def test_each_worker_of_two_says_so(make_real_manager: Make) -> None:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    manager = make_real_manager("deepseek-v2", parallel=two)
    assert uncalled(describe(manager._adapter_manager)) == {KV_B}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"deepseek-v2", "idefics3", "paligemma", "whisper"}))
def test_models_that_call_every_module_keep_all(make_real_manager: Make, name: str) -> None:
    assert uncalled(describe(make_real_manager(name)._adapter_manager)) == set()
