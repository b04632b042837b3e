"""Experts of vLLM's own models: slots hold what vLLM writes, and what does not fit fails in the background.

vLLM computes fused experts with Triton alone, so slots are compared, not answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.scheduler.messages import Failed
from lora_plugins.worker.lora_metrics import slot_bytes
from lora_plugins.worker.model_description import describe
from tests.worker.real_models import (
    PER_EXPERT,
    held_in,
    tensors_for,
    write_adapter,
)
from tests.worker.small_model import bring, evict, put, serve, slots_of, use_compiled_kernels

RANK = 6  # the second of two workers has less than half of it, where slots of rank 8 are divided
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
MIXED, SHARED = {"enable_mixed_moe_lora_format": True}, {"enable_moe_shared_loras": True}


def described(manager: Any) -> ModelModules:
    return describe(manager._adapter_manager)


@pytest.mark.parametrize(
    ("name", "of_format", "options"),
    [
        *((name, ExpertFormat.PER_EXPERT, {}) for name in (*PER_EXPERT, "nemotron-h")),
        ("gpt-oss", ExpertFormat.STACKED, {}),
        ("gpt-oss", ExpertFormat.STACKED, MIXED),
        ("gpt-oss", ExpertFormat.PER_EXPERT, MIXED),
        ("qwen3-moe", ExpertFormat.STACKED, MIXED),
        ("qwen3-moe", ExpertFormat.SHARED, SHARED),
        ("gpt-oss", ExpertFormat.SHARED, SHARED),
        ("qwen3-moe", ExpertFormat.PER_EXPERT, {"parallel": TWO}),
        ("qwen3-moe", ExpertFormat.PER_EXPERT, {"parallel": TWO, "fully_sharded_loras": True}),
        ("qwen3-moe", ExpertFormat.PER_EXPERT, {"parallel": {**TWO, "enable_expert_parallel": True}}),
        ("gpt-oss", ExpertFormat.STACKED, {"parallel": TWO}),
        ("gpt-oss", ExpertFormat.STACKED, {"parallel": {**TWO, "enable_expert_parallel": True}}),
    ],
)  # fmt: skip
def test_slots_hold_what_vllm_writes(
    make_real_manager: Any, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
) -> None:
    ours, vllms = make_real_manager(name, **options), make_real_manager(name, LRUCacheWorkerLoRAManager, **options)
    is_3d = of_format is ExpertFormat.STACKED
    adapter = write_adapter(tmp_path / "a", 7, tensors_for(described(ours), of_format, RANK), RANK, is_3d=is_3d)
    serve(ours, adapter, 1)
    vllms.add_adapter(adapter.request())
    assert slots_of(ours) == [None, 7]
    wanted = held_in(vllms, slots_of(vllms).index(7))
    found = held_in(ours, 1)
    assert found.keys() == wanted.keys()
    assert [place for place in wanted if not torch.equal(found[place], wanted[place])] == []
    assert all(wanted[place].any() for place in wanted), "the adapter fills every module"


@pytest.mark.parametrize("of_format", [ExpertFormat.STACKED, ExpertFormat.PER_EXPERT])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_no_caller_has_to_say_that_experts_are_stacked(
    make_real_manager: Any, tmp_path: Path, file: str, of_format: ExpertFormat
) -> None:
    """The scheduler's commands name a path alone, so what a caller has said of it would be lost."""
    ours, vllms = (
        make_real_manager("qwen3-moe", **MIXED),
        make_real_manager("qwen3-moe", LRUCacheWorkerLoRAManager, **MIXED),
    )
    is_3d = of_format is ExpertFormat.STACKED
    adapter = write_adapter(tmp_path / "a", 7, tensors_for(described(ours), of_format, RANK), RANK, is_3d=is_3d)
    weights = adapter.path / "adapter_model.safetensors"
    if file != weights.name:
        torch.save(load_file(weights), adapter.path / file)
        weights.unlink()
    vllms.add_adapter(adapter.request())
    serve(ours, adapter, 1)
    wanted, found = held_in(vllms, slots_of(vllms).index(7)), held_in(ours, 1)
    assert found.keys() == wanted.keys()
    assert [place for place in wanted if not torch.equal(found[place], wanted[place])] == []


@pytest.mark.parametrize(
    ("name", "of_format", "options"),
    [
        ("mixtral", ExpertFormat.PER_EXPERT, {}),
        ("qwen3-moe", ExpertFormat.STACKED, MIXED),
        ("qwen3-moe", ExpertFormat.SHARED, SHARED),
    ],
)
def test_an_eviction_multiplies_no_scaling_twice(
    make_real_manager: Any, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
) -> None:
    """vLLM multiplies the scalings of experts in place, into what is kept in host memory and mapped from the store."""
    manager, is_3d = make_real_manager(name, **options), of_format is ExpertFormat.STACKED
    tensors = tensors_for(described(manager), of_format, RANK)
    first, other = (write_adapter(tmp_path / f"{it}", it, tensors, RANK, is_3d=is_3d) for it in (7, 8))
    file = (first.path / "adapter_model.safetensors").read_bytes()
    serve(manager, first, 1)
    wanted = {place: tensor.clone() for place, tensor in held_in(manager, 1).items()}

    def wrong() -> list[str]:
        assert slots_of(manager) == [None, 7]
        return [place for place, tensor in held_in(manager, 1).items() if not torch.equal(tensor, wanted[place])]

    serve(manager, other, 1)
    put(manager, first, 1)
    assert wrong() == [], "from host memory"
    evict(manager, first)
    put(manager, other, 1)
    serve(manager, first, 1)
    assert wrong() == [], "from the file"
    assert (first.path / "adapter_model.safetensors").read_bytes() == file


def changed(tensors: dict[str, torch.Tensor], change: str, which: str) -> dict[str, torch.Tensor]:
    """With one pair of tensors of a module changed, or without it."""
    a, b = (f"base_model.model.{which}.lora_{side}.weight" for side in "AB")
    other = dict(tensors)
    match change:
        case "missing":
            del other[a], other[b]
        case "wide":
            other[a] = torch.cat([other[a], other[a][..., :1]], -1)
        case "narrow":
            other[a] = other[a][..., :-1].contiguous()
        case "twice as wide":
            other[a] = torch.cat([other[a]] * 2, -1)
        case "high":
            other[b] = torch.cat([other[b], other[b][..., :1, :]], -2)
        case "low":
            other[b] = other[b][..., :-1, :].contiguous()
        case "twice as high":
            other[b] = torch.cat([other[b]] * 2, -2)
        case "half as high":
            other[b] = other[b][..., : other[b].shape[-2] // 2, :].contiguous()
        case "one rank more":
            other[a] = torch.cat([other[a], other[a][..., :1, :]], -2)
            other[b] = torch.cat([other[b], other[b][..., :1]], -1)
        case "twice the rank":
            other[a], other[b] = torch.cat([other[a]] * 2, -2), torch.cat([other[b]] * 2, -1)
        case "A and B of different ranks":
            other[a] = other[a][..., :-1, :].contiguous()
    return other


CHANGES = [
    "missing", "wide", "narrow", "twice as wide", "high", "low", "twice as high", "half as high", "one rank more",
    "twice the rank", "A and B of different ranks",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "of_format", "options"),
    [
        ("mixtral", ExpertFormat.PER_EXPERT, {}),
        ("gpt-oss", ExpertFormat.STACKED, {}),
        ("gpt-oss", ExpertFormat.STACKED, MIXED),
        ("qwen3-moe", ExpertFormat.SHARED, SHARED),
        ("qwen3-moe", ExpertFormat.PER_EXPERT, {"parallel": TWO}),
        ("gpt-oss", ExpertFormat.STACKED, {"parallel": TWO}),
        ("gpt-oss", ExpertFormat.STACKED, {"parallel": {**TWO, "enable_expert_parallel": True}}),
    ],
)
def test_experts_of_other_shapes_fail_in_the_background(
    make_real_manager: Any, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
) -> None:
    manager = make_real_manager(name, **options)
    modules = described(manager)
    tensors = tensors_for(modules, of_format, RANK)
    is_3d = of_format is ExpertFormat.STACKED
    parts = [
        part
        for part, place in modules.places.items()
        if place.kind is ModuleKind.EXPERTS and (place.stacked > 1) is is_3d
    ]
    for number, change in enumerate(CHANGES, 1):
        part = parts[number % len(parts)]
        other = changed(tensors, change, part)
        report = bring(manager, write_adapter(tmp_path / change, number, other, RANK, is_3d=is_3d))
        assert isinstance(report, Failed), change
        assert isinstance(report.error, IncompatibleAdapter), change
        assert part in str(report.error), change
    before = held_in(manager, 0)
    serve(manager, write_adapter(tmp_path / "good", 99, tensors, RANK, is_3d=is_3d), 0)
    assert not any(torch.equal(tensor, before[place]) for place, tensor in held_in(manager, 0).items())


@pytest.mark.parametrize(("name", "options"), [("mixtral", {}), ("gpt-oss", {}), ("qwen3-moe", SHARED)])
def test_slots_of_experts_count(make_real_manager: Any, name: str, options: dict[str, Any]) -> None:
    manager = make_real_manager(name, **options)._adapter_manager
    held = {}
    for module in manager.modules.values():
        for attribute, value in vars(module).items():
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if attribute.endswith("_stacked") and isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
    assert slot_bytes(manager.modules, manager.slots) == sum(held.values())


@pytest.mark.parametrize(
    ("name", "of_format"), [("mixtral", ExpertFormat.PER_EXPERT), ("gpt-oss", ExpertFormat.STACKED)]
)
def test_experts_are_copied_beside_layers_that_are_placed(
    make_real_manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, of_format: ExpertFormat
) -> None:
    vllms = make_real_manager(name, LRUCacheWorkerLoRAManager)
    use_compiled_kernels(monkeypatch)
    ours = make_real_manager(name)
    adapter = write_adapter(tmp_path / "a", 7, tensors_for(described(ours), of_format, RANK), RANK)
    serve(ours, adapter, 1)
    assert not ours.jobs.entries[7].adapter.is_instant
    assert "Compiled" in ours.lora_metrics()["performance"]["kernel_backend"]
    vllms.add_adapter(adapter.request())
    wanted, found = held_in(vllms, slots_of(vllms).index(7)), held_in(ours, 1)
    experts = [place for place in wanted if ".experts." in place]
    assert len(experts) >= 4
    assert [place for place in experts if not torch.equal(found[place], wanted[place])] == []


@pytest.mark.parametrize(
    ("name", "of_format"), [("mixtral", ExpertFormat.PER_EXPERT), ("gpt-oss", ExpertFormat.STACKED)]
)
def test_padded_experts_are_divided_right_or_refused(
    make_real_manager: Any, tmp_path: Path, name: str, of_format: ExpertFormat
) -> None:
    """As a GPU's backend pads them; vLLM before 0.33 takes the second worker's part from behind the padding."""
    manager = make_real_manager(name, parallel=TWO)
    tensors = tensors_for(described(manager), of_format, RANK)
    for module in manager._adapter_manager.modules.values():
        if hasattr(module, "moe_config"):
            module.moe_config.intermediate_size_per_partition += 8
            module.create_lora_weights(2, manager._adapter_manager.lora_config, manager._adapter_manager.model.config)
            own = module.moe_config.intermediate_size_per_partition_unpadded
            down = torch.arange(2.0 * own).expand(1, RANK, 2 * own)
            is_right = torch.equal(module._slice_w2_a(down)[0, 0], torch.arange(own, 2.0 * own))
    report = bring(manager, write_adapter(tmp_path / "a", 1, tensors, RANK))
    assert isinstance(report, Failed) is not is_right
    if isinstance(report, Failed):
        assert "16 features a worker, padded to 24" in report.error.found
    others = {key: tensor for key, tensor in tensors.items() if ".experts" not in key}
    assert not isinstance(bring(manager, write_adapter(tmp_path / "b", 2, others, RANK)), Failed)
