"""The operators in Triton's interpreter: every path, the sharded halves, changing ranks, refusals."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lora_plugins.kernels.slot_ranks import SlotRanks
from lora_plugins.kernels.triton_ops import expand, operators, shrink
from lora_plugins.kernels.triton_ops.operators import Batch, Operators
from lora_plugins.kernels.triton_ops.rank_tables import DeviceRanks, constant_ranks
from lora_plugins.kernels.tuning import PACKAGED, ExpandTile, FusedTile, Plan, ShrinkTile, Table, read_table
from tests.kernels.common import pairwise
from tests.kernels.triton_bed import TOLERANCE, Bed, some_vectors
from tests.repetitions import IS_LONG, times

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = [(shrink, "_shrink_kernel"), (expand, "_expand_kernel")]
TWO = Plan(16, ShrinkTile(columns=32, splits=2), ExpandTile(columns=32))
ONE = Plan(16, ShrinkTile(), ExpandTile(), FusedTile(columns_in=32, columns_out=32))
PATHS = {
    "shrink and expand": Table("test", (TWO,)),
    "fused": Table("test", (ONE,)),
    "dense": Table("test", (TWO,), dense_min_rows=1),
}


@pytest.fixture(autouse=True)
def _no_operators_left() -> Iterator[None]:
    yield
    operators._operators = None


def set_up(table: Table, **kwargs: object) -> Operators:
    made = Operators(table, **kwargs)
    operators.use(made)
    return made


def cut(bed: Bed) -> Batch:
    batch = Batch(max(1, bed.x.shape[0]), len(bed.ranks), "cpu")
    slots = torch.tensor(bed.slot_of_row, dtype=torch.int64)
    batch.cut(slots, {slot for slot in bed.slot_of_row if slot >= 0}, base_rows=any(s < 0 for s in bed.slot_of_row))
    return batch


def linear(bed: Bed, *, scale: float = 1.0, add_inputs: bool = True) -> torch.Tensor:
    y = bed.y.clone()
    torch.ops.lora_plugins.lora_linear(
        y, bed.x, bed.a, bed.b, *cut(bed).tensors, bed.widths, scale, 0, add_inputs
    )  # fmt: skip
    return y


@pairwise(
    path=list(PATHS),
    dtype=DTYPES,
    slot_of_row={"mixed": [0, -1, 2, 1, 1, 0, 3], "one slot": [1, 1, 1], "no rank": [3, 3]},
    turned={"plain": (), "vectors": (1, 2, 3)},
)
def test_every_path_is_right(path: str, dtype: torch.dtype, slot_of_row: list[int], turned: tuple[int, ...]) -> None:
    ranks = [[0, 16, 5], [32, 8, 1], [7, 0, 0], [0, 0, 0]]
    bed = Bed.make(slot_of_row, ranks, n_in=39, widths=(24, 40, 9), dtype=dtype, padding=2, turned=turned)
    set_up(PATHS[path]).register(bed.a, bed.b, bed.slot_ranks)
    bed.check(linear(bed, scale=0.5), scale=0.5)
    bed.check(linear(bed, add_inputs=False), add_inputs=False)


@settings(max_examples=times(40, short=6))
@given(data=st.data(), path=st.sampled_from(sorted(PATHS)), dtype=st.sampled_from(DTYPES), n_in=st.integers(1, 70))
def test_any_batch_on_any_path(data: st.DataObject, path: str, dtype: torch.dtype, n_in: int) -> None:
    widths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    ranks = [[data.draw(st.integers(0, 16)) for _ in widths] for _ in range(3)]
    slot_of_row = data.draw(st.lists(st.integers(-1, 2), max_size=8))
    turned = data.draw(st.sets(st.integers(0, 2)))
    bed = Bed.make(slot_of_row, ranks, n_in=n_in, widths=widths, max_rank=16, dtype=dtype, turned=turned)
    set_up(PATHS[path]).register(bed.a, bed.b, bed.slot_ranks)
    bed.check(linear(bed))


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("shrink and expand", torch.float16),
        ("fused", torch.bfloat16),
        pytest.param("shrink and expand", torch.float32, marks=pytest.mark.nightly),
        pytest.param("fused", torch.float32, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_rows_beside_vectors_keep_every_bit(path: str, dtype: torch.dtype) -> None:
    slot_of_row, found = [0, 1, -1, 2, 0, 1], []
    for turned in ((), (1,)):
        bed = Bed.make(slot_of_row, [[8, 3], [16, 0], [0, 0]], widths=(24, 9), dtype=dtype, turned=turned)
        set_up(PATHS[path]).register(bed.a, bed.b, bed.slot_ranks)
        found.append(linear(bed))
        bed.check(found[-1])
    plain = [row for row, slot in enumerate(slot_of_row) if slot != 1]
    assert torch.equal(found[0][plain], found[1][plain])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot", [0, 1], ids=["pair", "vectors alone"])
def test_the_dense_path_computes_vectors_too(slot: int, dtype: torch.dtype) -> None:
    bed = Bed.make([slot] * 3, [[8, 3], [0, 0]], widths=(24, 9), dtype=dtype, padding=2, turned=(0, 1))
    made = set_up(PATHS["dense"])
    made.register(bed.a, bed.b, bed.slot_ranks)
    assert made.takes_dense_path(bed.y, bed.x, cut(bed).host.tolist())
    bed.check(linear(bed))
    bed.check(linear(bed, add_inputs=False), add_inputs=False)


@pytest.mark.parametrize("path", PATHS)
def test_columns_of_padding_behind_a_heads_words_keep_their_content(path: str) -> None:
    bed = Bed.make([0] * 3, [[8]], widths=(24,), turned=(0,))
    set_up(PATHS[path]).register(bed.a, bed.b, bed.slot_ranks)
    y = torch.cat([bed.y, torch.ones(3, 8)], 1)
    torch.ops.lora_plugins.lora_linear(y, bed.x, bed.a, bed.b, *cut(bed).tensors, bed.widths, 1.0, 0, True)
    bed.check(y[:, :24])
    assert torch.equal(y[:, 24:], torch.ones(3, 8))


class Launches:
    """A kernel, and its launches as a CUDA graph keeps them: addresses, numbers and constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.kept = kernel, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.kept.append(functools.partial(self.kernel[grid], *args, **constants))
            self.kept[-1]()

        return launch


@pytest.mark.parametrize("path", ["shrink and expand", "fused"])
def test_earlier_launches_are_right_once_a_slot_has_vectors(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured when no slot has any, and replayed as it was."""
    launches = [Launches(module.__dict__[name]) for module, name in KERNELS]
    for (module, name), kept in zip(KERNELS, launches, strict=True):
        monkeypatch.setattr(module, name, kept)
    bed = Bed.make([0, 1, -1, 1], [[8, 3], [0, 0]], widths=(24, 9))
    ranks, y = bed.slot_ranks, bed.y.clone()
    set_up(PATHS[path]).register(bed.a, bed.b, ranks)
    torch.ops.lora_plugins.lora_linear(y, bed.x, bed.a, bed.b, *cut(bed).tensors, bed.widths, 1.0, 0, True)
    bed.check(y)
    for bed.vectors in ({1: some_vectors(33, 1)}, {0: some_vectors(33, 2), 1: some_vectors(33, 3)}, {}):
        for slot, of_slices in enumerate(bed.ranks):
            ranks.writing(slot)
            ranks.written(slot, of_slices)
            if slot in bed.vectors:
                ranks.turn(slot, bed.vectors[slot])
        y.copy_(bed.y)
        for launch in (one for kept in launches for one in kept.kept):
            launch()
        bed.check(y)


def test_vectors_of_another_size_than_the_modules_are_refused() -> None:
    bed = Bed.make([0], [[8]])
    ranks = bed.slot_ranks
    set_up(PATHS["fused"]).register(bed.a, bed.b, ranks)
    with pytest.raises(RuntimeError, match="size"):
        ranks.turn(0, some_vectors(31, 0))


def test_every_plan_of_the_default_table_is_right() -> None:
    table = read_table(PACKAGED / "default.json")
    for plan in table.plans:
        bed = Bed.make([0, 1, -1, 0], [[8, 32], [32, 3]], n_in=72, widths=(40, 24), dtype=torch.float16)
        set_up(Table("test", (Plan(plan.chunk, plan.shrink, plan.expand, plan.fused),))).register(
            bed.a, bed.b, bed.slot_ranks
        )
        bed.check(linear(bed))


def test_a_slot_reused_by_another_rank_is_computed_at_it() -> None:
    bed = Bed.make([0, 0], [[16]])
    ranks, made = bed.slot_ranks, set_up(PATHS["shrink and expand"])
    made.register(bed.a, bed.b, ranks)
    bed.check(linear(bed))
    device_ranks = made.module(bed.a, bed.b, bed.widths, 0)[1].device_ranks
    where = device_ranks.data_ptr()
    for rank in (4, 0, 32):
        smaller = Bed.make([0, 0], [[rank]], seed=rank)
        bed.a[0].copy_(smaller.a[0])
        bed.b[0].copy_(smaller.b[0])
        bed.ranks = [[rank]]
        ranks.writing(0)
        ranks.written(0, [rank])
        bed.check(linear(bed))
        assert device_ranks.tolist() == [[rank], [0]]
        assert made.module(bed.a, bed.b, bed.widths, 0)[1].device_ranks.data_ptr() == where, "which graphs read"


def test_constant_ranks_outlive_a_sleep_that_discards_the_others() -> None:
    """Level 2 discards what was made while the model was loaded; slots are written again, and nothing else."""
    ranks = SlotRanks(2, (16, 16))
    followed = DeviceRanks().follow(ranks, 2, "cpu")
    constant = constant_ranks([8], 2, "cpu")
    followed._base.fill_(-7)
    for slot in range(2):
        ranks.written(slot, (4, 0))
    assert followed.tolist() == [[4, 4], [0, 0], [0, 0]]
    assert constant.tolist() == [[8, 8], [0, 0]]


def test_an_unregistered_module_is_computed_at_its_slots_rank() -> None:
    bed = Bed.make([0, 1, -1], [[32], [32]])
    set_up(PATHS["shrink and expand"])
    bed.check(linear(bed))


def test_more_modules_than_one_block_of_ranks_holds() -> None:
    made = set_up(PATHS["shrink and expand"])
    beds = [Bed.make([0, 1], [[seed % 9], [3]], n_in=16, max_rank=8, seed=seed) for seed in range(260)]
    for bed in beds:
        made.register(bed.a, bed.b, bed.slot_ranks)
    for bed in (beds[0], beds[255], beds[256], beds[259]):
        bed.check(linear(bed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shrink_and_expand_apart_as_sharded_layers_use_them(dtype: torch.dtype) -> None:
    bed = Bed.make([1, -1, 0], [[8, 0], [3, 32]], widths=(24, 9), dtype=dtype, padding=1)
    set_up(PATHS["shrink and expand"]).register(bed.a, bed.b, bed.slot_ranks)
    batch = cut(bed)
    t = torch.full((2, 4, 32), float("nan"))
    torch.ops.lora_plugins.lora_shrink(t, bed.x, bed.a, *batch.tensors, 1.0)
    assert not t[:, [1, 3]].any()
    assert not t[0, 0, 3:].any()
    y = bed.y.clone()
    torch.ops.lora_plugins.lora_expand(y, t, bed.b, *batch.tensors, bed.widths, 0, True)
    bed.check(y)


def test_expand_from_an_offset_leaves_the_columns_before_it() -> None:
    bed = Bed.make([0, -1], [[8]], widths=(16,))
    set_up(PATHS["shrink and expand"]).register(bed.a, bed.b, bed.slot_ranks)
    t = torch.randn(1, 2, 32)
    y = torch.zeros(2, 21)
    torch.ops.lora_plugins.lora_expand(y, t, bed.b, *cut(bed).tensors, bed.widths, 5, True)
    assert not y[:, :5].any()
    want = bed.b[0][0, 0, :, :8].double() @ t[0, 0, :8].double()
    assert (y[0, 5:].double() - want).abs().max() < TOLERANCE[torch.float32] * 10


def test_one_plan_gives_equal_bits_in_any_batch() -> None:
    ranks = [[8], [24]]
    long = Bed.make([0, 1, 0, 1, 1], ranks, n_in=80, dtype=torch.float16)
    table = read_table(PACKAGED / "default.json")
    made = set_up(table.invariant())
    assert made.table.plan(1, 8, 8) is made.table.plan(10**6, 8, 8)
    made.register(long.a, long.b, long.slot_ranks)
    whole = linear(long)
    alone = Bed(long.x[3:4], long.y[3:4], long.a, long.b, [1], ranks, [32], 32)
    assert torch.equal(linear(alone)[0], whole[3])


@pytest.mark.parametrize(
    ("table", "captured_rows", "dense"),
    [(PATHS["dense"], 0, True), (PATHS["dense"], 3, False), (PATHS["dense"].invariant(), 0, False)],
    ids=["free", "captured", "invariant"],
)
def test_the_dense_path_is_for_batches_that_no_graph_holds(table: Table, captured_rows: int, dense: bool) -> None:
    bed = Bed.make([1, 1, 1], [[8], [8]])
    made = set_up(table, captured_rows=captured_rows)
    assert made.takes_dense_path(bed.y, bed.x, [3, 1, 1, 0]) is dense
    assert not made.takes_dense_path(bed.y, bed.x, [3, 1, -1, 0])
    assert not made.takes_dense_path(bed.y.half(), bed.x, [3, 1, 1, 0])


def test_host_sees_a_single_slot_only_if_all_rows_do() -> None:
    for slots, single in (([1, 1], 1), ([1, 0], -1), ([1, -1], -1), ([-1], -1)):
        assert cut(Bed.make(slots, [[8], [8]])).host.tolist() == [len(slots), int(max(slots) >= 0), single, 0, 0]


def test_an_input_of_another_dtype_than_the_weights_is_refused() -> None:
    bed = Bed.make([0], [[8]])
    set_up(PATHS["fused"])
    bed.x = bed.x.half()
    with pytest.raises(TypeError, match=r"input of torch\.float16"):
        linear(bed)


@pytest.mark.deployment(
    "torch.compile", "tested", "on GPUs: to Dynamo each of our Triton products is one operator (interpreter)"
)
def test_compiled_code_calls_the_operator_as_one_step() -> None:
    bed = Bed.make([0, -1, 1], [[8], [3]], n_in=24)
    set_up(PATHS["shrink and expand"]).register(bed.a, bed.b, bed.slot_ranks)
    tensors = cut(bed).tensors

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = y * 1.0
        torch.ops.lora_plugins.lora_linear(y, x, bed.a, bed.b, *tensors, bed.widths, 1.0, 0, True)
        return y

    bed.check(step(bed.y, bed.x))


@pytest.mark.parametrize("name", ["lora_linear", "lora_shrink", "lora_expand"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.float16], ids=str)
def test_operators_are_what_they_tell_torch(name: str, dtype: torch.dtype) -> None:
    """They write `y` and nothing else, also where torch compiles them for any number of rows."""
    bed = Bed.make([0, 1, 1, 0, 0], [[32, 32]] * 2, n_in=24, widths=(16, 8), dtype=dtype)
    set_up(PATHS["shrink and expand"]).register(bed.a, bed.b, bed.slot_ranks)
    t, tensors = torch.zeros(2, 5, 32), cut(bed).tensors
    arguments: dict[str, tuple[Any, ...]] = {
        "lora_linear": (bed.y, bed.x, bed.a, bed.b, *tensors, bed.widths, 1.0, 0, True),
        "lora_shrink": (t, bed.x, bed.a, *tensors, 1.0),
        "lora_expand": (bed.y, torch.randn_like(t), bed.b, *tensors, bed.widths, 0, True),
    }
    done = torch.library.opcheck(getattr(torch.ops.lora_plugins, name).default, arguments[name])
    assert set(done.values()) == {"SUCCESS"}


class Allocations(TorchDispatchMode):
    """Bytes of the largest float32 tensor made without a content: partial sums, where x is of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format and made.dtype == torch.float32:
            self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return made


def allocated_bytes(bed: Bed) -> int:
    with Allocations() as allocations:
        operators.lora_linear(bed.y.clone(), bed.x, bed.a, bed.b, *cut(bed).tensors, bed.widths, 1.0, 0, True)
    return allocations.largest_bytes


@pytest.mark.parametrize("is_invariant", [False, True], ids=["any plan", "one plan"])
def test_a_run_without_adapters_takes_the_memory_of_one_with(is_invariant: bool) -> None:
    """vLLM measures the memory that a step takes in the former, and gives what is left to its KV cache."""
    plans = (
        Plan(16, ShrinkTile(columns=32, splits=8), ExpandTile(columns=32), max_rows=5),
        Plan(16, ShrinkTile(columns=32, splits=4), ExpandTile(columns=32), max_rows=8),
        Plan(16, ShrinkTile(columns=32, splits=2), ExpandTile(columns=32)),
    )
    table = Table("test", plans)
    set_up(table.invariant() if is_invariant else table)
    ranks = [[16, 16]] * 2
    profiled = Bed.make([-1] * 12, ranks, widths=(16, 8), dtype=torch.float16)
    measured = allocated_bytes(profiled)
    for rows in (1, 5, 6, 8, 9, 12) if IS_LONG else (1, 6, 9):  # each plan's first, and last
        bed = Bed(
            profiled.x[:rows].nan_to_num(0), profiled.y[:rows], profiled.a, profiled.b, [0] * rows, ranks, [16, 8], 32
        )
        assert 0 < allocated_bytes(bed) <= measured
    assert allocated_bytes(profiled) == 0, "it has been taken"


@pytest.mark.parametrize("n_in", [24, 8200], ids=["narrow", "wide input"])
def test_a_run_without_adapters_launches_every_plan(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched first while serving is compiled in the engine's loop, and everybody waits."""
    launched: set[object] = set()
    for name in ("shrink", "expand", "fused"):
        launch = getattr(operators, name)

        def noting(*args: Any, launch: Any = launch, **kwargs: Any) -> None:
            launched.update(it for it in args if isinstance(it, ShrinkTile | ExpandTile | FusedTile))
            launch(*args, **kwargs)

        monkeypatch.setattr(operators, name, noting)
    rows = 2100
    made = set_up(read_table(PACKAGED / "default.json"))
    bed = Bed.make([-1] * rows, [(16, 16), (5, 0)], widths=(16, 8), n_in=n_in)
    assert torch.equal(linear(bed), bed.y)
    plans = {made.table.plan(size, n_in, 16) for size in range(1, rows + 1)}
    assert len(plans) > 3
    reachable = {tile for plan in plans for tile in ([plan.fused] if plan.fused else [plan.shrink, plan.expand])}
    assert launched == reachable
    launched.clear()
    linear(bed)
    assert launched == set(), "once"
