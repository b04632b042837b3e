"""CPU kernels against the reference, with NaN beyond every true rank and in every row that is not theirs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.kernels import cpu
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.cpu import Buffers
from tests.kernels.common import assert_equal, batch_of, make_case, pairwise

RANKS = [(8,), (0,), (16,), (1,), (5,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WHOSE = ["torch"] if build.problem() else ["torch", "compiled"]
PRODUCTS = [(whose, dtype) for whose in WHOSE for dtype in DTYPES]
BATCHES = {
    "empty": [],
    "one row": [2],
    "one base row": [-1],
    "only base rows": [-1] * 70,
    "one adapter": [0] * 5,
    "one adapter, many rows": [2] * 70,
    "an adapter of rank 0": [1] * 3,
    "interleaved": [0, 2, 3, 4, 0, 2, 3, 4],
    "interleaved with base": [-1, 0, -1, 2, 1, -1, 0, 4, -1],
    "base rows between one adapter's": [3, -1, 3],
    "two long runs": [0] * 32 + [2] * 32,
    "prefill beside decode": [0, 2, -1, 4] + [2] * 40 + [-1] * 40 + [3, 0],
    "long runs of one slot, twice": [0] * 40 + [2] * 40 + [0] * 40,
    "many rows in turn": [row % 5 for row in range(200)],
    "one has most rows": [0, 2, 0, 0, 4, *[3] * 20, 0, -1, 4],
}
LARGEST_COPIED = {"copied": cpu.LARGEST_COPIED_RANK, "larger ones viewed": 3}


@pytest.fixture
def largest_copied(request, monkeypatch):
    """The rank above which an adapter is computed from views of its slot."""
    monkeypatch.setattr(cpu, "LARGEST_COPIED_RANK", request.param)


# No vectors, vectors of slots with and without ranks, and of all.
@pairwise(
    slot_of_row=BATCHES,
    products=WHOSE,
    dtype=DTYPES,
    turned={"none": (), "few": (0, 1), "none in a slice": (2, 3), "all": range(5)},
    largest_copied=LARGEST_COPIED,
    indirect=["largest_copied"],
)
@pytest.mark.usefixtures("largest_copied")
def test_slices_of_several_widths_ranks_and_with_vectors(slot_of_row, products, dtype, turned):
    ranks = [(8, 8, 8), (0, 0, 0), (16, 0, 3), (0, 1, 0), (5, 2, 16)]
    options = {"inn": 65, "widths": (31, 7, 40), "dtype": dtype, "products": products}
    case = make_case(slot_of_row, ranks, **options, turned=turned)
    y = case.outputs(padding_rows=3)
    found = case.computed(y)
    assert_equal(found, case.expected(y), y, slot_of_row)
    plain = make_case(slot_of_row, ranks, **options).computed(y)
    others = [row for row, slot in enumerate(slot_of_row) if slot not in turned]
    assert torch.equal(found[others].nan_to_num(), plain[others].nan_to_num()), "bit by bit as without vectors"


@pytest.mark.parametrize("products", WHOSE)
def test_vectors_end_with_the_slots_next_write(products):
    case = make_case([0, 2, 0], RANKS, products=products, turned=(0, 2))
    y, ranks = case.outputs(), case.weights.ranks
    turned = case.expected(y)
    assert_equal(case.computed(y), turned, y, case.slot_of_row)
    ranks.written(2, (16,))
    assert list(ranks.vectors) == [0]
    found = case.computed(y)
    assert not torch.allclose(found[1], turned[1])
    assert_equal(found, case.expected(y), y, case.slot_of_row)


def test_rows_with_vectors_that_are_strided():
    case = make_case([0, -1, 1], RANKS, products=WHOSE[-1], turned=(0, 1))
    y = case.outputs()
    strided = torch.stack([y, torch.full_like(y, torch.nan)], -1)[..., 0]
    case.plan().run(strided, case.x)
    assert_equal(strided, case.expected(y), y, case.slot_of_row)


@given(
    runs=st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 50)), max_size=9),
    ranks=st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=5, max_size=5),
    inn=st.integers(1, 70),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    products=st.sampled_from(PRODUCTS),
    scale=st.sampled_from([1.0, 0.5]),
    largest_copied=st.integers(0, 9),
    turned=st.sets(st.integers(0, 4)),
)
def test_any_shape(runs, ranks, inn, widths, products, scale, largest_copied, turned):
    slot_of_row = [slot for slot, length in runs for _ in range(length)]
    whose, dtype = products
    case = make_case(slot_of_row, ranks, inn=inn, widths=widths, max_rank=9, dtype=dtype, products=whose, turned=turned)
    with mock.patch.object(cpu, "LARGEST_COPIED_RANK", largest_copied):
        case.check(scale=scale, padding_rows=1)


@pairwise(
    slot_of_row=BATCHES,
    bad=[torch.nan, torch.inf, -torch.inf],
    side="ab",
    dtype=DTYPES,
    products=WHOSE,
    largest_copied=LARGEST_COPIED,
    indirect=["largest_copied"],
)
@pytest.mark.usefixtures("largest_copied")
def test_a_non_finite_adapter_spoils_its_own_rows_only(slot_of_row, bad, side, dtype, products):
    case = make_case(slot_of_row, RANKS, dtype=dtype, products=products)
    getattr(case.weights, side)[0][4, 0, 0, 0] = bad
    y = case.outputs()
    found, expected = case.computed(y), case.expected(y)
    others = [slot if slot != 4 else -1 for slot in slot_of_row]
    rows = [row for row, slot in enumerate(slot_of_row) if slot != 4]
    assert_equal(found[rows], expected[rows], y[rows], [others[row] for row in rows])
    assert not any(found[row].isfinite().all() for row, slot in enumerate(slot_of_row) if slot == 4)


@pytest.mark.parametrize("products", WHOSE)
def test_a_slot_reused_by_a_smaller_rank_shows_nothing_older(products):
    case = make_case([0, 2, 0, 2], RANKS, products=products)
    case.check()  # slot 2 at rank 16
    a, b, ranks = case.weights.a[0], case.weights.b[0], case.weights.ranks
    ranks.writing(2)
    a[2], b[2] = torch.nan, torch.nan  # whatever is left of the old adapter must not be read
    a[2, 0, :3], b[2, 0, :, :3] = torch.randn(3, a.shape[-1]), torch.randn(b.shape[2], 3)
    ranks.written(2, [3])
    case.ranks[2] = (3,)
    case.check()


def test_a_write_makes_plans_of_the_module_old():
    case = make_case([0], RANKS)
    plan = case.plan()
    assert plan.is_for(1.0)
    assert not plan.is_for(0.5)
    case.weights.ranks.writing(4)
    assert not plan.is_for(1.0)


@pytest.mark.parametrize("products", WHOSE)
def test_an_adapter_of_a_large_rank_is_not_copied(products):
    rank = cpu.LARGEST_COPIED_RANK + 1
    case = make_case([0, -1], [(rank, 0, 3)], widths=(5, 6, 7), max_rank=rank, products=products)
    case.check()
    assert case.weights.compiled(batch_of([0]).rows) == {}


@pytest.mark.parametrize("products", WHOSE)
def test_module_without_an_adapter_in_the_batch_does_nothing(products):
    assert make_case([1, 1], RANKS, products=products).plan().steps == ()


def test_narrower_adapters_are_computed_in_their_own_dtype():
    case = make_case([0, -1, 2], RANKS, dtype=torch.bfloat16)
    y = case.outputs().float()  # vLLM's head_dtype: wide logits over a narrow adapter
    found, expected = case.computed(y), case.expected(y)
    assert torch.allclose(found[[0, 2]], expected[[0, 2]], rtol=0.05, atol=0.1)
    assert found[1].isnan().all()


@pytest.mark.parametrize("width", [15, 25])
@pytest.mark.parametrize("slot_of_row", [[0, 2, -1, 0], [2] * 4], ids=str)
def test_a_padded_vocabulary_on_either_side(slot_of_row, width):
    case = make_case(slot_of_row, RANKS, widths=(20,))
    y = torch.randn(4, width)
    wide = torch.zeros(4, 20)
    wide[:, : min(width, 20)] = y[:, :20]
    expected = y.clone()
    expected[:, :20] = case.expected(wide)[:, :width]
    assert torch.allclose(case.computed(y), expected, atol=1e-5)


def test_buffers_are_shared_and_only_grow():
    buffers = Buffers()
    large = buffers.take((10, 10), torch.float32)
    assert buffers.take((3, 4), torch.float32).data_ptr() == large.data_ptr()
    assert buffers.take((3, 4), torch.float32).is_contiguous()
    assert buffers.take((3, 4), torch.float16).dtype == torch.float16


@pytest.mark.parametrize("products", WHOSE)
def test_a_plan_made_in_inference_mode_runs_outside_it(products):
    case = make_case([0, 2, 0], RANKS, products=products)
    y = case.outputs()
    with torch.inference_mode():
        plan = case.plan()
    found = y.clone()
    with torch.no_grad():
        plan.run(found, case.x)
    assert_equal(found, case.expected(y), y, case.slot_of_row)


@pytest.mark.parametrize("products", WHOSE)
def test_modules_of_one_batch_share_buffers(products):
    slot_of_row = [0, 2, -1, 0]
    one, other = (make_case(slot_of_row, RANKS, inn=inn, seed=inn, products=products) for inn in (33, 65))
    buffers = Buffers()
    for case in (one, other, one):
        case.check(buffers)
