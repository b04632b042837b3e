"""Adapters in panels of their own: the same answers as through the slots, of which nothing is read then."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
)
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

from lora_plugins.errors import InvalidAdapter
from lora_plugins.kernels import reference
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.packing import packer_of
from lora_plugins.kernels.punica_cpu import CompiledPunicaWrapperCPU, ReferencePunicaWrapper
from lora_plugins.worker.slot_copy import patch_set_lora
from tests.kernels.common import assert_equal, pairwise
from tests.kernels.cpu_layers import SLOTS, bare_layer, make_wrapper, map_rows
from tests.repetitions import times

if build.problem():
    pytest.skip(f"{build.problem()}: then there are no panels", allow_module_level=True)

patch_set_lora()
MAX_RANK, INN = 256, 37
RANKS = [1, 7, 8, 16, 17, 64, 100, 256]
WIDTHS = [(19,), (40, 11), (33, 16, 5)]
DTYPES = [torch.float32, torch.float16]
MIXED = [0, -1, 2, 1, 0, *[1] * 40, -1, *[0] * 33, 2]


def layer_of(widths, dtype=torch.float32, kind=None, inn=INN):
    """A layer with NaN in all its slots."""
    kind = kind or (BaseLinearLayerWithLoRA if len(widths) == 1 else MergedColumnParallelLinearWithLoRA)
    return bare_layer(kind, widths, inn, MAX_RANK, dtype, torch.nan)


def wrapper_with(*layers, slot_of_row=MIXED, kind=CompiledPunicaWrapperCPU):
    return make_wrapper(kind, slot_of_row, *layers)


def random_sides(rank, widths, dtype=torch.float32, inn=INN, missing=()):
    a = [None if i in missing else (torch.randn(rank, inn) / inn**0.5).to(dtype) for i in range(len(widths))]
    b = [None if i in missing else (torch.randn(w, rank) / rank**0.5).to(dtype) for i, w in enumerate(widths)]
    return a, b


def given(sides):
    """As `set_lora` takes them: a layer of one slice is given no lists."""
    return tuple(side[0] for side in sides) if len(sides[0]) == 1 else sides


class Truth:
    """What each slot should hold, for the reference."""

    def __init__(self, layer):
        self.widths = layer.output_slices
        self.a = [torch.zeros(part.shape) for part in layer.lora_a_stacked]
        self.b = [torch.zeros(part.shape) for part in layer.lora_b_stacked]

    def put(self, slot, sides, scaling=1.0):
        for stack_a, stack_b, a, b in zip(self.a, self.b, *sides, strict=True):
            stack_a[slot], stack_b[slot] = 0, 0
            if a is not None:
                stack_a[slot, 0, : a.shape[0]] = a
                stack_b[slot, 0, :, : a.shape[0]] = scaling * b.float()

    def check(self, wrapper, layer, slot_of_row=MIXED):
        map_rows(wrapper, slot_of_row)
        dtype = layer.lora_a_stacked[0].dtype
        x, y = torch.randn(len(slot_of_row), INN).to(dtype), torch.randn(len(slot_of_row), sum(self.widths)).to(dtype)
        found, expected = y.clone(), y.clone()
        ranks = [[MAX_RANK] * len(self.widths)] * SLOTS
        reference.lora_linear(expected, x, self.a, self.b, slot_of_row, ranks, self.widths)
        wrapper.add_lora_linear(found, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, self.widths)
        assert_equal(found, expected, y, slot_of_row)


def block(n_bytes):
    """Memory at a multiple of 64, full of NaN, and what hears of its end."""
    memory = np.full(n_bytes + 128, 0xFF, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory)[start : start + n_bytes], weakref.ref(memory)


def bits(packed):
    return packed.flat.view(torch.uint8).tolist()


@pairwise(rank=RANKS, widths=WIDTHS, dtype=DTYPES)
def test_every_rank_and_number_of_slices(rank, widths, dtype):
    layer = layer_of(widths, dtype)
    wrapper, truth = wrapper_with(layer), Truth(layer)
    for slot, missing in enumerate([(), (0,) if len(widths) > 1 else (), (1, 2) if len(widths) == 3 else ()]):
        sides = random_sides(rank, widths, dtype, missing=missing)
        packed = packer_of(layer).pack(*given(sides))
        assert packed.ranks == tuple(0 if i in missing else rank for i in range(len(widths)))
        packer_of(layer).place(slot, packed)
        truth.put(slot, sides)
    truth.check(wrapper, layer)
    assert all(packer_of(layer).panels.is_placed(slot) for slot in range(SLOTS))


@pairwise(rank=[3, 40], source=[torch.float32, torch.bfloat16, torch.float16], dtype=DTYPES, scaling=[0.3, 2.0])
def test_scaling_is_as_if_folded_before_in_the_sources_dtype(rank, source, dtype, scaling):
    layer = layer_of((19,), dtype)
    wrapper_with(layer)
    a, b = given(random_sides(rank, (19,), source))
    before = b.clone()
    folded = b.clone()
    folded *= scaling
    pack = packer_of(layer).pack
    assert bits(pack(a, b, scaling)) == bits(pack(a.to(dtype), folded.to(dtype)))
    assert torch.equal(b, before)


def test_a_scaling_for_each_slice():
    widths = (19, 5, 8)
    layer = layer_of(widths)
    wrapper_with(layer)
    a, b = random_sides(5, widths, missing=(1,))
    pack = packer_of(layer).pack
    assert bits(pack(a, b, [2.0, None, 0.5])) == bits(pack(a, [b[0] * 2, None, b[2] * 0.5]))


@pytest.mark.parametrize("widths", WIDTHS, ids=len)
@pytest.mark.parametrize("rank", [1, 17, 100])
def test_in_a_block_of_the_callers(rank, widths):
    """One for all modules of an adapter, full of something else before."""
    layers = [layer_of(widths) for _ in range(2)]
    wrapper = wrapper_with(*layers)
    adapters = [random_sides(rank, widths) for _ in layers]
    sizes = [packer_of(layer).size_bytes(*given(sides)) for layer, sides in zip(layers, adapters, strict=True)]
    memory, end = block(sum(sizes))
    for layer, sides, part in zip(layers, adapters, memory.split(sizes), strict=True):
        packed = packer_of(layer).pack(*given(sides), memory=part)
        assert packed.flat.data_ptr() == part.data_ptr()
        assert part.numel() - 64 < packed.flat.nbytes <= part.numel()
        assert bits(packed) == bits(packer_of(layer).pack(*given(sides)))
        packer_of(layer).place(1, packed)
        packer_of(layer).place(0, None)
        truth = Truth(layer)
        truth.put(1, sides)
        truth.check(wrapper, layer, [1, 0, -1, *[1] * 40])
    del memory, part, packed
    layers[0].reset_lora(1)
    gc.collect()
    assert end() is not None
    layers[1].reset_lora(1)
    gc.collect()
    assert end() is None


@pytest.mark.parametrize("wrong", ["too small", "unaligned"])
def test_memory_of_another_kind_is_refused(wrong):
    layer = layer_of((19,))
    wrapper_with(layer)
    a, b = given(random_sides(8, (19,)))
    needed = packer_of(layer).size_bytes(a, b)
    memory, _ = block(2 * needed + 64)
    parts = {
        "too small": memory[: needed - 64],
        "unaligned": memory[4:],
    }
    with pytest.raises(ValueError, match=r"memory of .*: \d+ bytes at a multiple of 64 are needed"):
        packer_of(layer).pack(a, b, memory=parts[wrong])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(4, INN - 1), torch.randn(19, 4)),
        (torch.randn(4, INN), torch.randn(18, 4)),
        (torch.randn(4, INN), torch.randn(19, 3)),
        (torch.randn(3, INN), torch.randn(19, 4)),
        (torch.randn(4, INN), None),
    ],
    ids=["narrow A", "low B", "more rows of A", "more columns of B", "no B"],
)
def test_what_is_smaller_than_the_slot_gets_zeros(a, b):
    """As in vLLM's slot, whose rest is zero."""
    layer = layer_of((19,))
    wrapper, truth, packer = wrapper_with(layer), Truth(layer), packer_of(layer)
    truth.a[0][1, 0, : a.shape[0], : a.shape[1]] = a
    if b is not None:
        truth.b[0][1, 0, : b.shape[0], : b.shape[1]] = b
    packer.place(1, packer.pack(a, b))
    truth.check(wrapper, layer, [1, -1, 1])
    layer.set_lora(1, a, b)
    truth.check(wrapper, layer, [1, -1, 1])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(MAX_RANK + 1, INN), torch.zeros(19, MAX_RANK + 1)),
        (torch.zeros(4, INN + 1), torch.zeros(19, 4)),
        (torch.zeros(4, INN), torch.zeros(20, 4)),
        ([torch.zeros(4, INN)] * 2, [torch.zeros(19, 4)] * 2),
    ],
    ids=["rank", "wide A", "high B", "two slices"],
)
def test_what_is_larger_than_the_slot_is_refused(a, b):
    layer = layer_of((19,))
    wrapper_with(layer)
    with pytest.raises(InvalidAdapter):
        packer_of(layer).pack(a, b)
    with pytest.raises(InvalidAdapter):
        packer_of(layer).size_bytes(a, b)


@pytest.mark.parametrize("pairs", [1, 2])
def test_one_pair_for_several_slices_is_divided_as_slots_are(pairs):
    """A checkpoint with one weight for a module that vLLM has several slices of."""
    widths = (12, 7, 5, 5)[: 2 + pairs]
    layer = layer_of(widths, kind=MergedColumnParallelLinearVariableSliceWithLoRA if pairs == 1 else None)
    wrapper, truth, packer = wrapper_with(layer), Truth(layer), packer_of(layer)
    a, b, last_a, last_b = torch.randn(3, INN), torch.randn(24, 3), torch.randn(5, INN), torch.randn(5, 5)
    if pairs == 1:
        packer.place(0, packer.pack(a, b))
        truth.put(0, ([a] * 3, [*b.split(widths)]))
    else:
        packer.place(0, packer.pack([a, last_a], [b, last_b], [2.0, 0.5]))
        truth.put(0, ([a] * 3 + [last_a], [*(2 * b).split(widths[:3]), last_b / 2]))
    truth.check(wrapper, layer, [0, 0, -1])
    if pairs == 1:
        layer.set_lora(0, a, b)
        truth.check(wrapper, layer, [0, 0, -1])


def is_untouched(layer):
    """No memory behind the layer's stacks that could be written, and none that has been."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    parts = (*a, *b) if isinstance(a, tuple) else (a, b)
    return all(set(part.stride()) == {0} and part.untyped_storage().nbytes() < 64 and not part.any() for part in parts)


@pytest.mark.parametrize("widths", WIDTHS, ids=len)
def test_a_layer_that_is_pointed_has_no_stacks(widths):
    layer = layer_of(widths)
    shapes = [part.shape for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
    wrapper, truth = wrapper_with(layer), Truth(layer)
    assert [part.shape for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)] == shapes
    truth.check(wrapper, layer)  # empty from the start
    sides = random_sides(8, widths)
    layer.set_lora(1, *given(sides))
    truth.put(1, sides)
    truth.check(wrapper, layer)
    assert is_untouched(layer)
    with pytest.raises(RuntimeError):
        layer.lora_a_stacked[0][0, 0, :8] = 1
    layer.reset_lora(1)
    truth.put(1, ([None] * len(widths),) * 2)
    truth.check(wrapper, layer)


@pytest.mark.parametrize("rank_of_worker", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        ColumnParallelLinearWithLoRA,
        RowParallelLinearWithLoRA,
        QKVParallelLinearWithLoRA,
        MergedColumnParallelLinearWithLoRA,
    ],
)
def test_each_of_two_workers_packs_what_its_slot_would_get(kind, rank_of_worker):
    widths = (8, 6) if kind is MergedColumnParallelLinearWithLoRA else (8,)
    layer = layer_of(widths, kind=kind)
    layer.tp_size, layer.tp_rank, layer.output_ids = 2, rank_of_worker, (rank_of_worker,) * len(widths)
    layer.output_size, layer.input_size, layer.is_merged_col_linear = 8, INN, False
    layer.q_proj_total_size, layer.q_proj_shard_size, layer.kv_proj_total_size, layer.kv_proj_shard_size = 8, 4, 4, 2
    layer.base_layer = SimpleNamespace(num_kv_head_replicas=1)
    inn, high = (2 * INN, 1) if kind is RowParallelLinearWithLoRA else (INN, 2)
    wrapper = wrapper_with(layer)
    sides = random_sides(5, [high * width for width in widths], inn=inn)
    packed = packer_of(layer).pack(*given(sides))
    layer.set_lora(0, *given(sides))
    assert bits(wrapper._modules[id(layer.lora_a_stacked)].panels.of(0)) == bits(packed)


def test_a_heads_logits():
    layer = object.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.tp_size = 2  # the logits are gathered before its adapter is added
    layer.lora_a_stacked = torch.full((SLOTS, 1, MAX_RANK, INN), torch.nan)
    layer.lora_b_stacked = torch.full((SLOTS, 1, 30, MAX_RANK), torch.nan)
    wrapper = wrapper_with(layer, slot_of_row=[0, -1, 2])
    a, b = given(random_sides(100, (30,)))
    packer_of(layer).place(0, packer_of(layer).pack(a, b))
    packer_of(layer).place(2, None)
    x, y = torch.randn(3, INN), torch.randn(3, 30)
    found = y.clone()
    wrapper.add_lora_logits(found, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0)
    assert torch.equal(found[1:], y[1:])
    assert torch.allclose(found[0], y[0] + b @ (a @ x[0]), atol=1e-4)
    layer.set_lora(2, a, b[:20])  # fewer words than the model's
    wrapper.add_lora_logits(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0)
    assert torch.equal(y[0], found[0])
    assert torch.equal(y[2, 20:], found[2, 20:])
    assert torch.allclose(y[2, :20], found[2, :20] + b[:20] @ (a @ x[2]), atol=1e-4)
    assert is_untouched(layer)


@pytest.mark.parametrize("large", [100, 12], ids=["a rank that is not copied", "a rank that is"])
def test_slots_change_hands_between_adapters_and_between_ways(large):
    widths = (40, 11)
    layer = layer_of(widths)
    wrapper, truth, packer = wrapper_with(layer), Truth(layer), packer_of(layer)
    one, other, third = (random_sides(rank, widths) for rank in (large, 9, 5))
    packed, packed_other = packer.pack(*one), packer.pack(*other)

    def placed(slot, what, sides):
        packer.place(slot, what)
        truth.put(slot, sides)

    def written(slot, sides):
        layer.set_lora(slot, *sides)
        truth.put(slot, sides)

    def emptied(slot):
        layer.reset_lora(slot)
        truth.put(slot, ([None, None], [None, None]))

    for slot in range(SLOTS):
        placed(slot, packed, one)  # one adapter in every slot
    for change in (
        lambda: placed(1, packed_other, other),
        lambda: written(0, third),  # beside placed ones
        lambda: placed(0, packed, one),  # over what is in the stacks
        lambda: written(0, other),
        lambda: emptied(1),
        lambda: placed(1, packed_other, other),
        lambda: written(1, one),
        lambda: emptied(2),
        lambda: written(2, third),
        lambda: placed(2, None, ([None, None], [None, None])),
        lambda: written(2, third),
    ):
        truth.check(wrapper, layer)
        change()
    truth.check(wrapper, layer)
    assert is_untouched(layer)


def test_a_write_that_breaks_off_ends_the_placing():
    layer = layer_of((19,))
    wrapper, packer = wrapper_with(layer), packer_of(layer)
    sides = random_sides(8, (19,))
    packer.place(0, packer.pack(*given(sides)))
    with pytest.raises(InvalidAdapter):
        layer.set_lora(0, torch.zeros(MAX_RANK + 1, INN), torch.zeros(19, MAX_RANK + 1))
    assert not packer.panels.is_placed(0)
    assert wrapper._modules[id(layer.lora_a_stacked)].compiled({0: [0]}) == {}


@pytest.mark.parametrize("end", ["reset", "written", "placed"])
@pytest.mark.parametrize("rank", [8, 100])
def test_an_adapters_memory_goes_with_its_slot(end, rank):
    """Without another batch: nothing else may come for a long time."""
    layer = layer_of((19,))
    wrapper, packer, truth = wrapper_with(layer), packer_of(layer), Truth(layer)
    sides = random_sides(rank, (19,))
    packed = packer.pack(*given(sides))
    for slot in range(SLOTS):
        packer.place(slot, packed)
        truth.put(slot, sides)
        assert packer.panels.of(slot).flat is packed.flat
    truth.check(wrapper, layer)
    assert is_untouched(layer)
    memory = weakref.ref(packed.flat)
    del packed
    for slot in range(SLOTS):
        assert memory() is not None
        if end == "reset":
            layer.reset_lora(slot)
        elif end == "written":
            layer.set_lora(slot, *given(sides))
        else:
            packer.place(slot, None)
    gc.collect()
    assert memory() is None


def test_a_layer_of_another_shape_is_refused():
    layer, other = layer_of((19,)), layer_of((19,), inn=INN - 1)
    wrapper_with(layer, other)
    packed = packer_of(layer).pack(*given(random_sides(8, (19,))))
    with pytest.raises(ValueError, match=r"packed for Shape\(inn=37, widths=\(19,\), dtype=torch.float32\)"):
        packer_of(other).place(0, packed)


def test_which_layers_have_a_packer():
    def packer(kind=CompiledPunicaWrapperCPU, dtype=torch.float32, **attributes):
        layer = layer_of((19,), dtype)
        vars(layer).update(attributes)
        wrapper_with(layer, kind=kind)
        return packer_of(layer)

    assert packer() is not None
    assert packer(lora_config=SimpleNamespace(fully_sharded_loras=False)) is not None
    assert packer(lora_config=SimpleNamespace(fully_sharded_loras=True)) is None
    assert packer(set_module_to_save=None) is None  # a classification head
    assert packer(dtype=torch.bfloat16) is not None
    assert packer(dtype=torch.float64) is None
    assert packer(kind=ReferencePunicaWrapper) is None
    assert packer_of(torch.nn.Linear(1, 1)) is None


def test_a_layer_that_is_registered_again_keeps_what_was_placed():
    layer = layer_of((19,))
    wrapper_with(layer)
    packer, truth = packer_of(layer), Truth(layer)
    sides = random_sides(8, (19,))
    packer.place(0, packer.pack(*given(sides)))
    truth.put(0, sides)
    again = wrapper_with(layer)
    truth.check(again, layer, [0, 0, -1])
    assert packer_of(layer).panels is packer.panels


def test_packing_beside_a_product_of_another_slot():
    widths = (40, 11)
    layer = layer_of(widths)
    wrapper, packer, truth = wrapper_with(layer), packer_of(layer), Truth(layer)
    adapters = [random_sides(rank, widths) for rank in (100, 8, 33)]
    for slot in (0, 2):
        packer.place(slot, packer.pack(*adapters[slot]))
        truth.put(slot, adapters[slot])
    found, version = [], packer.panels.ranks.version
    enough = threading.Event()

    def pack():
        while not enough.is_set():
            found.append(packer.pack(*adapters[1], 0.5))

    thread = threading.Thread(target=pack)
    thread.start()
    for _ in range(times(200, short=50)):
        truth.check(wrapper, layer, [0, -1, 0, 2])
    enough.set()
    thread.join()
    assert packer.panels.ranks.version == version
    assert len({bytes(bits(packed)) for packed in found}) == 1
    packer.place(1, found[0])
    truth.put(1, adapters[1], 0.5)
    truth.check(wrapper, layer)
