"""Slots that are only pointed at packed weights: as many as adapters in host memory, without memory of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.packing import packer_of
from lora_plugins.scheduler.messages import Activate, Load, Loaded, Slots
from lora_plugins.worker.host_memory import UntouchedZeros
from lora_plugins.worker.slot_counts import slots_of as slots_for
from tests.worker import small_model
from tests.worker.small_model import (
    WIDTH,
    Adapter,
    Make,
    bring,
    ended,
    evict,
    make_adapter,
    put,
    serve,
    slots_of,
    step,
    use_compiled_kernels,
    wrong_answers,
)
from tests.worker.test_fits import WORDS, model_with_words


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiled_kernels(monkeypatch)


@pytest.fixture
def twelve(tmp_path: Path) -> list[Adapter]:
    """Of ranks 1 to 8; one in three adapts some modules only."""
    some = {"q_proj": (WIDTH, WIDTH), "v_proj": (WIDTH, 8), "o_proj": (WIDTH, WIDTH)}
    return [
        make_adapter(
            tmp_path / f"{number}", number, rank=1 + number % 8, modules=some if number % 3 == 0 else small_model.SHAPES
        )
        for number in range(1, 13)
    ]


def resident_bytes(tensor: torch.Tensor) -> int:
    """What the system has given the mappings that hold the tensor; pages of zeros that were only read do not count."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            counts = int(head[1], 16) < last and first < int(head[2], 16)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_all_adapters_in_host_memory_run_in_one_batch(make_manager: Make, twelve: list[Adapter]) -> None:
    manager = make_manager(slots=2, max_adapters=12)
    assert manager._adapter_manager.slots == Slots(copied=2, pointed=12)
    for number, adapter in enumerate(twelve):
        report = bring(manager, adapter)
        assert isinstance(report, Loaded)
        assert report.is_instant
        manager.begin_step([Activate(adapter.adapter_id, 2 + number)])
    assert slots_of(manager) == [None, None, *range(1, 13)]
    assert wrong_answers(manager, *twelve) == []
    assert wrong_answers(manager, *twelve[::-1], twelve[3], twelve[0]) == []
    evict(manager, twelve[4])
    put(manager, twelve[0], 6)
    others = [adapter for adapter in twelve if adapter is not twelve[4]]
    assert wrong_answers(manager, *others) == []
    assert manager.lora_metrics()["adapters"]["slots"] == 14


@pytest.mark.parametrize("change", ["other kernels", "fully sharded", "float64"])
def test_where_slots_are_written_there_are_as_many_as_vllms(
    make_manager: Make, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    config = SimpleNamespace(max_loras=3, max_cpu_loras=9, lora_dtype=torch.bfloat16, fully_sharded_loras=False)
    assert slots_for(config, 64) == Slots(3, 9)
    assert slots_for(config, 5) == Slots(3, 5), "no batch has more"
    config.fully_sharded_loras = change == "fully sharded"
    config.lora_dtype = torch.float64 if change == "float64" else torch.bfloat16
    if change == "other kernels":
        from vllm.platforms import current_platform

        monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda _: "vllms.own"))
    assert slots_for(config, 64) == Slots(3)


# --- layers whose slots are written ---


@pytest.fixture
def with_words(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose model has an embedding layer too, which has no packer."""
    monkeypatch.setattr(small_model, "small_model", model_with_words)
    return make_manager(slots=2, max_adapters=12)


def adapter_of_words(directory: Path, number: int) -> tuple[Adapter, torch.Tensor]:
    """One that adapts the embedding and everything else, and what it adds to each word's."""
    generator, name = torch.Generator().manual_seed(number), "base_model.model.embed_tokens.lora_embedding"
    a, b = torch.randn(4, WORDS, generator=generator), torch.randn(WIDTH, 4, generator=generator)
    return make_adapter(directory, number, change={f"{name}_A": a, f"{name}_B": b}), 2 * (b @ a)


def wrong_words(manager: Any, batch: list[Adapter], deltas: dict[int, torch.Tensor]) -> list[int]:
    """Rows of the embedding that are not those of their adapters."""
    step(manager, *batch)
    layer = manager._adapter_manager.modules["embed_tokens"]
    layer.base_layer.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    words = torch.arange(len(batch)) * 3 % WORDS
    found = layer(words)
    wanted = layer.base_layer.weight[words].clone()
    for row, adapter in enumerate(batch):
        if adapter.adapter_id in deltas:
            wanted[row] += deltas[adapter.adapter_id][:, words[row]]
    return [row for row in range(len(batch)) if not torch.allclose(found[row], wanted[row], atol=1e-4)]


def linear_answers(manager: Any, *batch: Adapter) -> list[str]:
    """Of modules that `wrong_answers` knows to compute."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("embed_tokens", "lm_head", "fused"):
            patch.delitem(manager._adapter_manager.modules, name)
        return wrong_answers(manager, *batch)


def test_an_adapter_of_the_embedding_runs_beside_pointed_ones(
    with_words: Any, twelve: list[Adapter], tmp_path: Path
) -> None:
    manager, deltas = with_words, {}
    words, deltas[20] = adapter_of_words(tmp_path / "words", 20)
    other, deltas[21] = adapter_of_words(tmp_path / "other", 21)
    for number, adapter in enumerate(twelve[:6]):
        report = bring(manager, adapter)
        assert isinstance(report, Loaded)
        assert report.is_instant, "it does not adapt the embedding"
        put(manager, adapter, 2 + number)
    for slot, adapter in enumerate((words, other)):
        report = bring(manager, adapter)
        assert isinstance(report, Loaded)
        assert not report.is_instant
        put(manager, adapter, slot)
    batch = [twelve[0], words, twelve[4], other, twelve[5], words]
    assert wrong_words(manager, batch, deltas) == []
    assert linear_answers(manager, *batch) == []
    evict(manager, other)
    put(manager, twelve[0], 1)  # an instant one where an embedding has been
    batch = [twelve[0], words, twelve[4]]
    assert wrong_words(manager, batch, deltas) == []
    manager.rewrite_slots()
    assert wrong_words(manager, batch, deltas) == []
    assert linear_answers(manager, *batch) == []


def test_rows_of_pointed_slots_are_never_written(
    make_manager: Make, monkeypatch: pytest.MonkeyPatch, twelve: list[Adapter]
) -> None:
    monkeypatch.setattr(small_model, "small_model", model_with_words)
    monkeypatch.setattr("tests.worker.test_fits.WORDS", 4096)  # 128 KiB for each slot
    manager = make_manager(slots=2, max_adapters=12)
    layer = manager._adapter_manager.modules["embed_tokens"]
    assert packer_of(layer) is None
    stack = layer.lora_a_stacked
    assert stack.shape[0] == 14
    for number, adapter in enumerate(twelve):
        serve(manager, adapter, 2 + number)
    manager.rewrite_slots()
    step(manager, *twelve)
    layer(torch.arange(12))
    assert watched_ranks(layer)[5] == (0,)
    assert resident_bytes(stack) <= 2 * stack[0].nbytes + 2 * 4096
    assert (
        manager.lora_metrics()["memory"]["slot_mb"] < 1.1 * (stack[:2].nbytes + layer.lora_b_stacked[:2].nbytes) / 1e6
    )


def test_untouched_zeros_are_zeros_and_take_memory_when_written() -> None:
    with UntouchedZeros():
        made = torch.zeros((64, 1, 16, 1024), dtype=torch.float16)
        few, none, one = torch.zeros(3, 2), torch.zeros(0, 5), torch.zeros(())
        on = torch.zeros(4, device=torch.device("cpu"))
    assert (made.dtype, made.shape, few.shape, none.shape, one.shape) == (
        torch.float16, (64, 1, 16, 1024), (3, 2), (0, 5), ()
    )  # fmt: skip
    assert not on.any()
    assert resident_bytes(made) == 0
    assert not made.any()
    made[7] = 3
    assert resident_bytes(made) < 0.1 * made.nbytes
    assert made.sum() == 3 * 16 * 1024


# --- keys ---


def test_two_generations_of_one_adapter_run_beside_each_other(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager(slots=1, max_adapters=4)
    old, new = make_adapter(tmp_path / "old", 1, seed=1), make_adapter(tmp_path / "new", 1, seed=2, rank=7)
    serve(manager, old, 1)
    manager.begin_step([Load(new.spec, 1001, 77)])
    assert isinstance(ended(manager, 77), Loaded)
    manager.begin_step([Activate(1001, 2)])
    assert slots_of(manager)[:3] == [None, 1, 1001]
    later = replace(new, adapter_id=1001)  # as batches name it
    assert wrong_answers(manager, old, later) == []
    assert manager.list_adapters() == {1}
    evict(manager, old)
    assert manager.list_adapters() == {1}
    assert wrong_answers(manager, later) == []
