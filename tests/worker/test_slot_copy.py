"""A slot holds the adapter written last and nothing of any earlier one, whatever their ranks were."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lora_plugins.kernels.layers import watch
from lora_plugins.worker.slot_copy import patch_set_lora
from tests.worker.small_model import MAX_RANK, Make

patch_set_lora()
SEEDS = range(20)


def slots_of(module: Any, index: int) -> list[torch.Tensor]:
    return [part[index, 0].clone() for part in (*module.lora_a_stacked, *module.lora_b_stacked)]


def random_weights(module: Any, rank: int, generator: random.Random) -> tuple[list[Any], list[Any]]:
    """One A and B for each slice, some missing where there are several."""
    sides_a, sides_b = [], []
    for slot_a, slot_b in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True):
        missing = module.n_slices > 1 and generator.random() < 0.3
        sides_a.append(None if missing else torch.randn(rank, slot_a.shape[3]))
        sides_b.append(None if missing else torch.randn(slot_b.shape[2], rank))
    return sides_a, sides_b


def expected(module: Any, sides_a: list[Any], sides_b: list[Any]) -> list[torch.Tensor]:
    places = [torch.zeros(part.shape[2:]) for part in (*module.lora_a_stacked, *module.lora_b_stacked)]
    for place, side in zip(places, (*sides_a, *sides_b), strict=True):
        if side is not None:
            place[: side.shape[0], : side.shape[1]] = side
    return places


def write(module: Any, index: int, sides_a: list[Any], sides_b: list[Any]) -> None:
    if module.n_slices == 1:
        module.set_lora(index, sides_a[0], sides_b[0])
    else:
        module.set_lora(index, sides_a, sides_b)


@pytest.mark.parametrize("seed", SEEDS)
def test_stale_rows_never_survive(make_manager: Make, seed: int) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    modules = make_manager(slots=2)._adapter_manager.modules
    kinds = {type(module).__name__ for module in modules.values()}
    assert {"MergedQKVParallelLinearWithLoRA", "RowParallelLinearWithLoRA"} <= kinds
    for module in modules.values():
        for part in (*module.lora_a_stacked, *module.lora_b_stacked):
            part.fill_(float("nan"))
        module.__dict__.pop("_lora_plugins_slots", None)  # what it holds is not known
        want: dict[int, list[torch.Tensor]] = {}
        for _ in range(12):
            index = generator.randrange(2)
            if generator.random() < 0.2:
                module.reset_lora(index)
                want[index] = [torch.zeros_like(part) for part in slots_of(module, index)]
            else:
                weights = random_weights(module, generator.randint(1, MAX_RANK), generator)
                write(module, index, *weights)
                want[index] = expected(module, *weights)
            for slot, parts in want.items():
                assert all(map(torch.equal, slots_of(module, slot), parts))


@pytest.mark.parametrize("watched_first", [True, False], ids=["watched first", "written first"])
def test_watchers_of_slot_writes_are_notified(make_manager: Make, watched_first: bool) -> None:
    module = next(m for m in make_manager()._adapter_manager.modules.values() if m.n_slices == 1)
    layer = watch(module) if watched_first else None
    write(module, 0, *random_weights(module, MAX_RANK, random.Random(0)))
    ranks = (layer or watch(module)).ranks
    assert ranks is not None
    write(module, 0, *random_weights(module, 3, random.Random(0)))
    assert ranks[0] == (3,)
    assert not module.lora_a_stacked[0][0, 0, 3:].any()
    module.reset_lora(0)
    assert ranks[0] == (0,)


def test_narrower_than_the_slot_goes_vllms_way(make_manager: Make) -> None:
    """As for an adapter of a model with a smaller vocabulary; what is then known of the slot is nothing."""
    module = next(m for m in make_manager()._adapter_manager.modules.values() if m.n_slices == 1)
    write(module, 0, *random_weights(module, MAX_RANK, random.Random(0)))
    wide, high = module.lora_a_stacked[0].shape[3], module.lora_b_stacked[0].shape[2]
    narrow = ([torch.randn(2, wide - 1)], [torch.randn(high - 1, 2)])
    write(module, 0, *narrow)
    assert all(map(torch.equal, slots_of(module, 0), expected(module, *narrow)))
    full = random_weights(module, 1, random.Random(1))
    write(module, 0, *full)
    assert all(map(torch.equal, slots_of(module, 0), expected(module, *full)))
