"""Our wrapper as vLLM calls it: real mapping, real layers' set_lora, every path; base rows and padding untouched."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_plugins.errors import IncompatibleAdapter, InvalidSettings
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.packing import packer_of
from lora_plugins.kernels.punica_cpu import CompiledPunicaWrapperCPU, ReferencePunicaWrapper
from tests.kernels.common import assert_equal, make_case, padded_to
from tests.kernels.cpu_layers import SLOTS, bare_layer, make_wrapper, map_rows

MAX_RANK, INN = 8, 21
BATCHES = {
    "mixed": [0, -1, 2, 1, 0, -1],
    "one adapter": [1] * 4,
    "base only": [-1] * 3,
    "long": [0] * 40 + [-1] * 3 + [2] * 40,
    "empty": [],
}
OURS = [ReferencePunicaWrapper] if build.problem() else [ReferencePunicaWrapper, CompiledPunicaWrapperCPU]
batches = pytest.mark.parametrize("slot_of_row", BATCHES.values(), ids=BATCHES)


def layer_of(kind: type, widths: tuple[int, ...]) -> Any:
    return bare_layer(kind, widths, INN, MAX_RANK)


@pytest.fixture(params=OURS, ids=lambda kind: kind.__name__)
def wrapper_for(request):
    """Makes a wrapper for a batch's rows and perhaps sampled ones; by the reference, and compiled."""
    return functools.partial(make_wrapper, request.param)


def adapter(rank: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rank, INN), torch.randn(width, rank)


def test_vllms_own_gives_base_rows_an_adapter_or_masks_them():
    # What the issue is about; where this fails, 0.32 is no longer supported and our warning can go.
    slot_of_row = [0, -1]
    case = make_case(slot_of_row, [(8,)] * SLOTS, inn=INN, max_rank=MAX_RANK)
    y = torch.zeros(2, 19)
    make_wrapper(PunicaWrapperCPU, slot_of_row).add_lora_linear(y, case.x, case.weights.a, case.weights.b, 1.0, (19,))
    wrong = y[1].abs().max() > 0
    import vllm

    assert bool(wrong) is (tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 33))


@pytest.mark.parametrize("widths", [(11,), (11, 5)])
def test_set_lora_notes_the_true_rank_to_read(widths, wrapper_for):
    kind = BaseLinearLayerWithLoRA if len(widths) == 1 else MergedColumnParallelLinearWithLoRA
    layer = layer_of(kind, widths)
    slot_of_row = [0, 1, -1, 0]
    wrapper = wrapper_for(slot_of_row)
    wrapper.register(layer)
    wrapper.register(layer)  # a second wrapper may be given it too; its ranks are noted once
    held = {}
    for slot, rank in ((0, 8), (1, 2), (0, 3)):
        pairs = held[slot] = [adapter(rank, width) for width in widths]
        a, b = pairs[0] if len(widths) == 1 else ([a for a, _ in pairs], [b for _, b in pairs])
        layer.set_lora(slot, a, b)
    assert (watched_ranks(layer)[0], watched_ranks(layer)[1]) == ((3,) * len(widths), (2,) * len(widths))
    for part in (*layer.lora_a_stacked, *layer.lora_b_stacked):  # zeros beyond the rank become a trap
        if packer_of(layer) is None:
            part[part == 0] = torch.nan
    x, y = torch.randn(4, INN), torch.randn(4, sum(widths))
    found = y.clone()
    wrapper.add_lora_linear(found, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, widths)
    for row, slot in enumerate(slot_of_row):
        expected = y[row].clone()
        if slot >= 0:
            expected += torch.cat([b @ a @ x[row] for a, b in held[slot]])
        assert torch.allclose(found[row], expected, atol=1e-5)


def test_the_same_batch_goes_on_after_its_slot_was_rewritten(wrapper_for):
    # vLLM calls update_metadata only when the mapping changes; an adapter loaded in place changes none.
    layer = layer_of(BaseLinearLayerWithLoRA, (11,))
    wrapper = wrapper_for([0])
    wrapper.register(layer)
    x = torch.randn(1, INN)
    for rank in (8, 2, 5):
        a, b = adapter(rank, 11)
        layer.set_lora(0, a, b)
        layer.set_lora(2, *adapter(8, 11))  # in the background; no row is of its adapter
        y = torch.zeros(1, 11)
        wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, (11,))
        assert torch.allclose(y[0], b @ a @ x[0], atol=1e-5)


def test_layers_of_first_rows_and_with_leading_dimensions(wrapper_for):
    case = make_case([0, -1, 2, 1], [(8,)] * SLOTS, inn=INN, max_rank=MAX_RANK)
    wrapper = wrapper_for(case.slot_of_row)
    y = case.outputs()
    first = y[:3].clone()
    wrapper.add_lora_linear(first, case.x[:3], case.weights.a, case.weights.b, 1.0, case.widths)
    assert_equal(first, case.expected(y)[:3], y[:3], case.slot_of_row[:3])
    whole = y.clone().view(1, 4, -1)
    wrapper.add_lora_linear(whole, case.x.view(1, 4, -1), case.weights.a, case.weights.b, 1.0, case.widths)
    assert_equal(whole[0], case.expected(y), y, case.slot_of_row)


def test_rows_that_vllm_has_named_no_adapter_of_are_refused(wrapper_for):
    """An encoder's, say: without an adapter they would be computed silently as the base model's."""
    case = make_case([0, -1, 2, 1, *[-1] * 196], [(8,), (8,), (0,)], inn=INN, max_rank=MAX_RANK)
    layer = layer_with(case)
    wrapper = wrapper_for(case.slot_of_row[:4])
    wrapper.register(layer)
    y = case.outputs()
    found = y.clone()
    compute = functools.partial(wrapper.add_lora_linear, found, case.x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0)
    with pytest.raises(IncompatibleAdapter, match="a layer of 200 rows, of which vLLM names the adapters of 4"):
        compute(case.widths)
    with pytest.raises(IncompatibleAdapter, match="200 rows"), padded_to(8):
        compute(case.widths)
    shrunk = torch.zeros(len(case.widths), 200, MAX_RANK)
    with pytest.raises(IncompatibleAdapter, match="200 rows"):
        wrapper.add_shrink(shrunk, case.x, layer.lora_a_stacked, 1.0)
    assert torch.equal(found.nan_to_num(), y.nan_to_num())
    with padded_to(200):
        compute(case.widths)
    assert_equal(found, case.expected(y), y, case.slot_of_row)
    map_rows(wrapper, [-1] * 4)
    compute(case.widths)  # of no adapter nothing is lost


def test_without_adding_adapted_rows_are_overwritten_and_others_are_not(wrapper_for):
    case = make_case([0, -1, 2], [(8,), (8,), (0,)], inn=INN, max_rank=MAX_RANK)
    y = case.outputs()
    found = y.clone()
    wrapper = wrapper_for(case.slot_of_row)
    wrapper.register(layer_with(case))
    wrapper.add_lora_linear(found, case.x, case.weights.a, case.weights.b, 1.0, case.widths, add_inputs=False)
    assert_equal(found, case.expected(y, add_inputs=False), y, case.slot_of_row)


def layer_with(case) -> torch.nn.Module:
    layer = layer_of(BaseLinearLayerWithLoRA, case.widths)
    layer.lora_a_stacked, layer.lora_b_stacked = case.weights.a, case.weights.b
    layer._lora_plugins_ranks = case.weights.ranks
    return layer


def test_logits_follow_the_sampled_rows(wrapper_for):
    sampled = [2, -1, 0]
    case = make_case(sampled, [(8,)] * SLOTS, inn=INN, widths=(30,), max_rank=MAX_RANK)
    wrapper = wrapper_for([2] * 9 + [-1] * 4 + [0] * 2, sampled=sampled)
    y = case.outputs()
    found = y.clone()
    wrapper.add_lora_logits(found, case.x, case.weights.a[0], case.weights.b[0], 1.0)
    assert_equal(found, case.expected(y), y, sampled)


def test_embeddings_are_computed_at_their_own_rank(wrapper_for):
    """Most adapters hold no embedding: their slots are not even read."""
    layer = layer_of(VocabParallelEmbeddingWithLoRA, (11,))
    layer.lora_a_stacked, layer.lora_b_stacked = torch.zeros(SLOTS, 30, MAX_RANK), layer.lora_b_stacked[0]
    slot_of_row = [0, 1, -1, 2, 0]
    wrapper = wrapper_for(slot_of_row)
    wrapper.register(layer)
    layer.set_lora(0, torch.randn(3, 30), torch.randn(11, 3))
    layer.reset_lora(1)
    layer.set_lora(2, torch.randn(MAX_RANK, 30), torch.randn(11, MAX_RANK))
    x, y = torch.randn(5, MAX_RANK), torch.randn(5, 11)
    expected, found = y.clone(), y.clone()
    for row, rank in ((0, 3), (3, MAX_RANK), (4, 3)):
        expected[row] += layer.lora_b_stacked[slot_of_row[row], 0, :, :rank] @ x[row, :rank]
    layer.lora_b_stacked[0, ..., 3:] = layer.lora_b_stacked[1] = torch.nan
    wrapper.add_lora_embedding(found, x, layer.lora_b_stacked, add_input=True)
    assert_equal(found, expected, y, slot_of_row)


@batches
def test_shrink_and_expand_as_fully_sharded_layers_call_them(slot_of_row, wrapper_for):
    widths = (11, 5)
    case = make_case(slot_of_row, [(8, 8)] * SLOTS, inn=INN, widths=widths, max_rank=MAX_RANK)
    wrapper = wrapper_for(slot_of_row)
    n = len(slot_of_row)
    shrunk = torch.full((2, n, MAX_RANK), torch.nan)
    wrapper.add_shrink(shrunk, case.x, case.weights.a, 0.5)
    y = torch.randn(n, 3 + sum(widths))
    found = y.clone()
    wrapper.add_expand(found, shrunk, case.weights.b, widths, offset_start=3, add_input=True)
    expected = y.clone()
    case_expected = expected[:, 3:]
    if n:
        case_expected.copy_(case.expected(case_expected, scale=0.5))
    assert_equal(found, expected, y, slot_of_row)
    assert shrunk[:, [row for row, slot in enumerate(slot_of_row) if slot < 0]].isnan().all()


def test_layer_of_another_kind_is_left_to_vllm(logged, wrapper_for):
    wrapper = wrapper_for([])
    for _ in range(2):
        wrapper.register(torch.nn.Linear(1, 1))
    said = [record.getMessage() for record in logged.records if record.levelno == logging.INFO]
    assert said == ["CPU kernels: Linear is computed by vLLM's own path"]


def test_startup_fails_with_a_dtype_that_cannot_be_compiled(monkeypatch):
    def refuse(dtype: str):
        raise build.CannotCompile(f"cc failed: no {dtype}")

    monkeypatch.setattr(build, "product", refuse)
    wrapper = make_wrapper(CompiledPunicaWrapperCPU, [0])
    layer = layer_of(BaseLinearLayerWithLoRA, (11,))
    with pytest.raises(InvalidSettings, match=r"no float32.*LORA_PLUGINS_KERNELS=vllm"):
        wrapper.register(layer)
