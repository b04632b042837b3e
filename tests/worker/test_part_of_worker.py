"""With tensor parallelism a worker keeps its own part of an adapter in host memory; here the second of two."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from lora_plugins.adapter.model_modules import ExpertFormat
from lora_plugins.kernels.layers import stacks, watch
from lora_plugins.scheduler.messages import Loaded
from lora_plugins.worker.host_memory import bytes_of
from lora_plugins.worker.model_description import describe
from lora_plugins.worker.slot_copy import patch_set_lora
from tests.worker.real_models import HIDDEN, held_in, tensors_for, write_adapter
from tests.worker.small_model import MAX_RANK, Adapter, Make, bring, put, slots_of

patch_set_lora()
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARED = {"parallel": TWO, "fully_sharded_loras": True}


def adapter_for(manager: Any, directory: Path, rank: int) -> Adapter:
    """An adapter of every module of a manager's model."""
    tensors = tensors_for(describe(manager._adapter_manager), ExpertFormat.PER_EXPERT, rank)
    return write_adapter(directory, 7, tensors, rank)


def kept(manager: Any) -> Iterator[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """What the worker keeps of adapter 7 for each module: its name, its A's and its B's."""
    names = {id(module): name for name, module in manager._adapter_manager.modules.items()}
    for write in manager.jobs.entries[7].adapter.writes:
        if isinstance(write, functools.partial):  # empties a table of trained tokens
            continue
        held = inspect.getclosurevars(write).nonlocals
        a, b = (side if isinstance(side, list) else [side] for side in (held["a"], held["b"]))
        yield names[id(held["module"])].removeprefix("model.layers.0."), a, b


@pytest.mark.parametrize(
    ("options", "a_of_qkv", "b_of_o"),
    [({"parallel": TWO}, MAX_RANK, HIDDEN), (SHARED, MAX_RANK // 2, HIDDEN // 2)],
    ids=["usual", "fully sharded"],
)
def test_a_worker_keeps_its_part_in_one_piece(
    make_real_manager: Make, tmp_path: Path, options: dict[str, Any], a_of_qkv: int, b_of_o: int
) -> None:
    manager = make_real_manager("qwen2-moe", **options)
    report = bring(manager, adapter_for(manager, tmp_path / "a", MAX_RANK))
    assert isinstance(report, Loaded), report
    sides = {name: (a, b) for name, a, b in kept(manager)}
    everything = [tensor for pair in sides.values() for side in pair for tensor in side]
    assert all(tensor.is_contiguous() for tensor in everything)
    assert report.size_bytes == sum(map(bytes_of, everything)), "the budget counts what is kept"
    shapes = {name: ([tuple(it.shape) for it in a], [tuple(it.shape) for it in b]) for name, (a, b) in sides.items()}
    assert shapes["self_attn.qkv_proj"] == ([(a_of_qkv, HIDDEN)] * 3, [(HIDDEN // 2, MAX_RANK)] * 3)
    assert shapes["self_attn.o_proj"] == ([(MAX_RANK, HIDDEN // 2)], [(b_of_o, MAX_RANK)])
    assert shapes["mlp.gate"] == ([(MAX_RANK, HIDDEN)], [(4, MAX_RANK)]), "replicated, so whole"
    for name, module in manager._adapter_manager.modules.items():
        if (slots := stacks(module)) is not None and hasattr(module, "n_slices"):
            a, b = ([tuple(one.shape[2:]) for one in side] for side in slots)
            assert shapes[name.removeprefix("model.layers.0.")] == (a, b), "at the slots' rank, as large as the slot"


@pytest.mark.parametrize("options", [{"parallel": TWO}, SHARED], ids=["usual", "fully sharded"])
@pytest.mark.parametrize("rank", [6, MAX_RANK])
def test_parts_fill_slots_as_whole_sides_do(
    make_real_manager: Make, tmp_path: Path, options: dict[str, Any], rank: int
) -> None:
    """Fully sharded, the second worker has two of A's six rows; its B has all six columns."""
    ours, vllms = (make_real_manager("qwen2-moe", kind, **options) for kind in (None, LRUCacheWorkerLoRAManager))
    layers = [layer for module in ours._adapter_manager.modules.values() if (layer := watch(module)) is not None]
    adapter = adapter_for(ours, tmp_path / "a", rank)
    bring(ours, adapter)
    put(ours, adapter, 1)
    assert [set(layer.ranks[1]) for layer in layers] == [{rank}] * len(layers)
    vllms.add_adapter(adapter.request())  # whole, divided at the write
    wanted = held_in(vllms, slots_of(vllms).index(7))

    def wrong() -> list[str]:
        found = held_in(ours, 1)
        return [place for place in wanted if not torch.equal(found[place], wanted[place])]

    assert wrong() == []
    for module in ours._adapter_manager.modules.values():
        for stack in (one for side in stacks(module) or () for one in side):
            stack.fill_(float("nan"))
    ours.rewrite_slots()  # as after a sleep
    assert wrong() == []
