"""An adapter's table of copies writes what each layer's `set_lora` would, and says so to the same watchers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.layers import watch
from lora_plugins.worker.slot_copy import patch_set_lora
from lora_plugins.worker.slot_table import SlotTable, TableLayer, table_layer
from tests.worker.small_model import MAX_RANK
from tests.worker.test_slot_copy import expected, random_weights, slots_of, write

patch_set_lora()
COPY = build.copy()
if COPY is None:
    pytest.skip("nothing compiled can copy here: then PyTorch does", allow_module_level=True)

Weights = tuple[list[Any], list[Any]]


def of_layer(module: Any, sides_a: list[Any], sides_b: list[Any]) -> TableLayer | None:
    if module.n_slices == 1:
        return table_layer(module, sides_a[0], sides_b[0])
    return table_layer(module, sides_a, sides_b)


def table_of(weights: list[tuple[Any, Weights]]) -> SlotTable:
    layers = [of_layer(module, *sides) for module, sides in weights]
    assert None not in layers
    return SlotTable(COPY, layers)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_slot_holds_what_was_written_last(make_manager: Callable[..., Any], seed: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    modules = list(make_manager(slots=2)._adapter_manager.modules.values())
    for module in modules:
        for part in (*module.lora_a_stacked, *module.lora_b_stacked):
            part.fill_(float("nan"))
        module.__dict__.pop("_lora_plugins_slots", None)  # what it holds is not known
    want: dict[int, list[list[torch.Tensor]]] = {}
    for _ in range(8):
        index = generator.randrange(2)
        rank = generator.choice([1, 3, 8, MAX_RANK])  # rows of 32 bytes and of others
        weights = [(module, random_weights(module, rank, generator)) for module in modules]
        if generator.random() < 0.3:  # others write slots too
            for module, sides in weights:
                write(module, index, *sides)
        else:
            table_of(weights).write(index)
        want[index] = [expected(module, *sides) for module, sides in weights]
        for slot, parts in want.items():
            for module, of_module in zip(modules, parts, strict=True):
                assert all(map(torch.equal, slots_of(module, slot), of_module))
    torch.set_num_threads(before)


def linear(make_manager: Callable[..., Any], **options: Any) -> Any:
    return next(m for m in make_manager(**options)._adapter_manager.modules.values() if m.n_slices == 1)


def test_watchers_of_slot_writes_are_notified(make_manager: Callable[..., Any]) -> None:
    module = linear(make_manager)
    ranks = watch(module).ranks
    heard: list[int] = []
    ranks.listen(heard.append)
    stamp = ranks.stamp(0)
    table_of([(module, random_weights(module, 3, random.Random(0)))]).write(0)
    assert ranks[0] == (3,)
    assert heard == [0]
    assert ranks.stamp(0) > stamp


def test_stacks_made_again_are_written_layer_by_layer(make_manager: Callable[..., Any]) -> None:
    """The table has the addresses of the old ones."""
    module = linear(make_manager)
    weights = random_weights(module, 2, random.Random(0))
    table = table_of([(module, weights)])
    old = module.lora_a_stacked[0]
    module.lora_a_stacked = tuple(torch.full_like(part, torch.nan) for part in module.lora_a_stacked)
    old.fill_(7)
    table.write(0)
    assert (old == 7).all()
    assert all(map(torch.equal, slots_of(module, 0), expected(module, *weights)))


def test_a_set_lora_that_was_wrapped_since_is_called(make_manager: Callable[..., Any]) -> None:
    module = linear(make_manager)
    weights = random_weights(module, 2, random.Random(0))
    table = table_of([(module, weights)])
    ranks = watch(module).ranks
    table.write(0)
    assert ranks[0] == (2,)
    assert all(map(torch.equal, slots_of(module, 0), expected(module, *weights)))


@pytest.mark.parametrize("why", ["another dtype", "narrower", "columns apart", "set_lora of somebody else"])
def test_what_only_set_lora_can_write_is_in_no_table(make_manager: Callable[..., Any], why: str) -> None:
    module = linear(make_manager)
    (a,), (b,) = random_weights(module, 2, random.Random(0))
    assert table_layer(module, a, b) is not None
    if why == "another dtype":
        a = a.double()
    elif why == "narrower":
        a = a[:, 1:]
    elif why == "columns apart":
        b = b.t().contiguous().t()
    else:
        module.set_lora = functools.partial(module.set_lora)
    assert table_layer(module, a, b) is None
