"""Experts of vLLM's own models: slots hold what vLLM writes, and what does not fit fails in the background.

vLLM computes fused experts with Triton alone, so slots are compared, not answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.scheduler.messages import Failed, Loaded
from lora_plugins.worker.lora_metrics import slot_bytes
from lora_plugins.worker.model_description import describe
from tests.worker.real_models import (
    PER_EXPERT,
    held_in,
    tensors_for,
    unlike_vllms,
    write_adapter,
)
from tests.worker.small_model import Adapter, Make, bring, evict, failure, put, serve, slots_of, use_compiled_kernels

RANK = 6  # the second of two workers has less than half of it, where slots of rank 8 are divided
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
MIXED, SHARED = {"enable_mixed_moe_lora_format": True}, {"enable_moe_shared_loras": True}


def described(manager: Any) -> ModelModules:
    return describe(manager._adapter_manager)


def adapter_of(
    manager: Any,
    directory: Path,
    of_format: ExpertFormat,
    number: int = 7,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Adapter:
    """An adapter of every module of the manager's model, or of these tensors."""
    tensors = tensors or tensors_for(described(manager), of_format, RANK)
    return write_adapter(directory / str(number), number, tensors, RANK, is_3d=of_format is ExpertFormat.STACKED)


@pytest.mark.parametrize(
    ("name", "of_format", "options"),
    [
        *((name, ExpertFormat.PER_EXPERT, {}) for name in (*PER_EXPERT, "nemotron-h")),
        ("gpt-oss", ExpertFormat.STACKED, {}),
        ("gpt-oss", ExpertFormat.STACKED, MIXED),
        ("gpt-oss", ExpertFormat.PER_EXPERT, MIXED),
        ("qwen3-moe", ExpertFormat.STACKED, MIXED),
        ("qwen3-moe", ExpertFormat.PER_EXPERT, MIXED),
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
    make_real_manager: Make, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
) -> None:
    """No caller says that experts are stacked: the scheduler's commands name a path alone."""
    ours, vllms = (make_real_manager(name, kind, **options) for kind in (None, LRUCacheWorkerLoRAManager))
    assert unlike_vllms(ours, vllms, adapter_of(ours, tmp_path, of_format)) == []


@pytest.mark.parametrize("of_format", [ExpertFormat.STACKED, ExpertFormat.PER_EXPERT])
def test_files_of_torch_fill_slots_too(make_real_manager: Make, tmp_path: Path, of_format: ExpertFormat) -> None:
    ours, vllms = (make_real_manager("qwen3-moe", kind, **MIXED) for kind in (None, LRUCacheWorkerLoRAManager))
    adapter = adapter_of(ours, tmp_path, of_format)
    weights = adapter.path / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter.path / "adapter_model.bin")
    weights.unlink()
    assert unlike_vllms(ours, vllms, adapter) == []


@pytest.mark.parametrize(
    ("name", "of_format", "options"),
    [
        ("mixtral", ExpertFormat.PER_EXPERT, {}),
        ("qwen3-moe", ExpertFormat.STACKED, MIXED),
        ("qwen3-moe", ExpertFormat.SHARED, SHARED),
    ],
)
def test_an_eviction_multiplies_no_scaling_twice(
    make_real_manager: Make, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
) -> None:
    """vLLM multiplies the scalings of experts in place, into what is kept in host memory and mapped from the store."""
    manager = make_real_manager(name, **options)
    first, other = (adapter_of(manager, tmp_path, of_format, number) for number in (7, 8))
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


def more(side: torch.Tensor, dimension: int) -> torch.Tensor:
    """With its first row or column once more behind it."""
    return torch.cat([side, side.narrow(dimension, 0, 1)], dimension)


def less(side: torch.Tensor, dimension: int) -> torch.Tensor:
    return side.narrow(dimension, 0, side.shape[dimension] - 1).contiguous()


def twice(side: torch.Tensor, dimension: int) -> torch.Tensor:
    return torch.cat([side] * 2, dimension)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]] = {
    "missing": lambda a, b: (None, None),
    "wide": lambda a, b: (more(a, -1), b),
    "narrow": lambda a, b: (less(a, -1), b),
    "twice as wide": lambda a, b: (twice(a, -1), b),
    "high": lambda a, b: (a, more(b, -2)),
    "low": lambda a, b: (a, less(b, -2)),
    "twice as high": lambda a, b: (a, twice(b, -2)),
    "half as high": lambda a, b: (a, b[..., : b.shape[-2] // 2, :].contiguous()),
    "one rank more": lambda a, b: (more(a, -2), more(b, -1)),
    "twice the rank": lambda a, b: (twice(a, -2), twice(b, -1)),
    "A and B of different ranks": lambda a, b: (less(a, -2), b),
}


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
    make_real_manager: Make, tmp_path: Path, name: str, of_format: ExpertFormat, options: dict[str, Any]
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
    for number, (change, of_pair) in enumerate(CHANGES.items(), 1):
        part = parts[number % len(parts)]
        a, b = (f"base_model.model.{part}.lora_{side}.weight" for side in "AB")
        pair = dict(zip((a, b), of_pair(tensors[a], tensors[b]), strict=True))
        other = {name: tensor for name, tensor in (tensors | pair).items() if tensor is not None}
        error = failure(manager, adapter_of(manager, tmp_path, of_format, number, other))
        assert isinstance(error, IncompatibleAdapter), change
        assert part in str(error), change
    before = held_in(manager, 0)
    serve(manager, adapter_of(manager, tmp_path, of_format, 99), 0)
    assert not any(torch.equal(tensor, before[place]) for place, tensor in held_in(manager, 0).items())


@pytest.mark.parametrize(("name", "options"), [("mixtral", {}), ("gpt-oss", {}), ("qwen3-moe", SHARED)])
def test_slots_of_experts_count(make_real_manager: Make, name: str, options: dict[str, Any]) -> None:
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
    make_real_manager: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, of_format: ExpertFormat
) -> None:
    vllms = make_real_manager(name, LRUCacheWorkerLoRAManager)
    use_compiled_kernels(monkeypatch)
    ours = make_real_manager(name)
    adapter = adapter_of(ours, tmp_path, of_format)
    unlike = unlike_vllms(ours, vllms, adapter)
    assert not ours.jobs.entries[7].adapter.is_instant
    assert "Compiled" in ours.lora_metrics()["performance"]["kernel_backend"]
    assert len([place for place in held_in(ours, 1) if ".experts." in place]) >= 4
    assert not [place for place in unlike if ".experts." in place]


@pytest.mark.parametrize(
    ("name", "of_format"), [("mixtral", ExpertFormat.PER_EXPERT), ("gpt-oss", ExpertFormat.STACKED)]
)
def test_padded_experts_are_divided_right_or_refused(
    make_real_manager: Make, tmp_path: Path, name: str, of_format: ExpertFormat
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
    report = bring(manager, adapter_of(manager, tmp_path, of_format, 1, tensors))
    assert isinstance(report, Failed) is not is_right
    if isinstance(report, Failed):
        assert "16 features a worker, padded to 24" in report.error.found
    others = {key: tensor for key, tensor in tensors.items() if ".experts" not in key}
    assert isinstance(bring(manager, adapter_of(manager, tmp_path, of_format, 2, others)), Loaded)
