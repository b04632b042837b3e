"""The compiled product: what it needs, what it refuses, and shapes of many panels, blocks and chunks."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import platform
import re
import stat
import subprocess
import weakref
from pathlib import Path

import pytest
import torch

from lora_plugins.kernels import processor
from lora_plugins.kernels.compiled import build, prebuilt
from lora_plugins.kernels.compiled.library import Group, Slice, Work, product_of
from tests.kernels.common import Case, assert_equal, forget_what_was_built, make_case, pairwise
from tests.repetitions import IS_LONG

if build.problem():
    pytest.skip(f"{build.problem()}: then vLLM's kernels compute", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PANEL = build.product("float32").panel
LANES = build.product("float32").lanes


def made(slot_of_row: list[int], ranks: list[tuple[int, ...]], **options) -> Case:
    """A case that the compiled product computes."""
    return make_case(slot_of_row, ranks, products="compiled", **options)


THREADS = {"one thread": 1, "two threads": 2}


@pytest.fixture(params=THREADS.values(), ids=THREADS)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fresh():
    """What this process knows of the compiler is found out again, before and after the test."""
    forget_what_was_built()
    yield
    forget_what_was_built()


# Around the widths of panels and registers, and beyond one block and one run of blocks.
@pairwise(
    width=[1, LANES - 1, LANES, LANES + 1, PANEL - 1, PANEL, PANEL + 1, 8 * PANEL, 9 * PANEL + 3, 33 * PANEL + 3],
    rank=[1, LANES, LANES + 1, PANEL, PANEL + LANES, 64],
    dtype=DTYPES,
    threads=THREADS,
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_panels_of_every_width(width, rank, dtype):
    case = made([0, 1, -1, 0, 0, 1, 0], [(rank,), (3,)], inn=37, widths=(width,), max_rank=64, dtype=dtype)
    case.check(padding_rows=1)


@pairwise(rows=[1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 95, 96, 97, 250], dtype=DTYPES, threads=THREADS, indirect=["threads"])
@pytest.mark.usefixtures("threads")
def test_every_number_of_rows(rows, dtype):
    case = made([-1, *[1] * rows, 0], [(5, 40), (40, 7)], inn=50, widths=(70, 33), max_rank=40, dtype=dtype)
    case.check()


@pairwise(inn=[511, 512, 513, 1500], scale=[1.0, 0.25], dtype=DTYPES)
def test_sums_of_several_depths(inn, scale, dtype):
    case = made([0, 1, -1, 0, 1], [(20,), (7,)], inn=inn, widths=(40,), max_rank=20, dtype=dtype)
    case.check(scale=scale)


@pairwise(parts=[2, 3, 7], inn=[7, 600, 1500], dtype=DTYPES, threads=THREADS, indirect=["threads"])
@pytest.mark.usefixtures("threads")
def test_sums_that_are_divided_among_threads(parts, inn, dtype):
    """Here in parts of our choosing: a machine of many cores makes many."""
    slot_of_row = [0, 1, -1, *[2] * 100, 0, 1]
    ranks, widths = [(20, 7), (0, 64), (5, 0)], (40, 300)
    case = made(slot_of_row, ranks, inn=inn, widths=widths, max_rank=64, dtype=dtype)
    panels = case.weights.panels
    panels.product = dataclasses.replace(panels.product, parts=lambda *_: parts)
    case.check(scale=0.5)


@pytest.mark.parametrize(
    ("rows", "rank", "inn", "parts"),
    [(1, 16, 100, 2), (50, 16, 100, 1), (50, 16, 200, 2), (16, 8 * PANEL, 1024, 1), (96, 65, 1024, 1)],
    ids=["one row", "too little for two", "enough for two", "a task for every thread", "a rank that is not divided"],
)
def test_a_sum_is_divided_where_threads_would_be_idle(threads, rows, rank, inn, parts):
    kept = Slice(rank=65 if rank == 65 else 16)
    group = Group(n_rows=rows, rank=rank, n_slices=1, slices=ctypes.addressof(kept))
    work = Work(groups=ctypes.addressof(group), n_groups=1, inn=inn)
    found = build.product("float32").parts(ctypes.addressof(work))
    assert found == (parts if threads == 2 else 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_to_the_nearest(dtype):
    """Sums of two numbers between 1 and 2 lie half-way between two of the dtype's every second time."""
    width = 3 * PANEL + 5
    values, start = (1 + torch.rand(width).to(dtype) for _ in range(2))
    case = made([0], [(1,)], inn=1, widths=(width,), max_rank=1, dtype=dtype)
    case.weights.a[0][0] = case.x[:] = 1
    case.weights.b[0][0, 0, :, 0] = values
    assert torch.equal(case.computed(start[None])[0], (start.double() + values.double()).to(dtype))


@pytest.mark.parametrize("x", [torch.randn(4, 66)[:, ::2], torch.randn(8, 33)[::2]], ids=["columns", "rows"])
def test_inputs_with_strides_and_outputs_with_gaps(x):
    case = made([0, 1, -1, 0], [(8,), (3,)])
    case.x = x
    y = case.outputs()
    wide = torch.full((4, 38), 7.0)
    found = wide[:, ::2]
    found.copy_(y)
    case.plan().run(found, case.x)
    assert_equal(found, case.expected(y), y, case.slot_of_row)
    assert (wide[:, 1::2] == 7).all()


@pytest.mark.parametrize(("rows", "inn"), [(3, 33), (4, 32)], ids=["rows", "columns of x"])
def test_tensors_that_are_too_small_are_refused(rows, inn):
    case = made([0, 1, -1, 0], [(8,), (3,)])
    plan = case.plan()
    y = torch.zeros(rows, 19)
    with pytest.raises(ValueError, match="needs 4 rows, 33 columns of x"):
        plan.run(y, torch.randn(4, inn))
    assert not y.any()


@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("width", [19, 25], ids=["whole y", "y in a wider tensor"])
@pytest.mark.parametrize("x_stride", [33, 50])
def test_a_product_repeats_only_what_it_has_checked(rows, width, x_stride):
    case = made([0, 1, -1, 0], [(8,), (3,)])
    product = case.plan().alone
    case.x = torch.randn(rows, x_stride)[:, :33]

    def output() -> torch.Tensor:
        y = torch.full((rows, width), 7.0)[:, :19]
        y[[2, *range(4, rows)]] = torch.nan
        return y

    product(torch.zeros(4, 19), torch.zeros(4, 33))
    y = output()
    is_same = product.repeat(y, case.x)
    assert is_same is ((rows, width, x_stride) == (4, 19, 33))
    if not is_same:
        assert torch.equal(y.nan_to_num(), output().nan_to_num())
        product(y, case.x)
        y = output()
        assert product.repeat(y, case.x)
    assert_equal(y, case.expected(output()), output(), case.slot_of_row)
    for others in ((y.half(), case.x), (y, case.x.half()), (y[:3], case.x), (y, case.x[:, :32])):
        assert not product.repeat(*others)


def test_panels_are_made_once_for_what_a_slot_holds():
    panels = made([], [(8,), (8,)]).weights.panels
    first = panels.of(0)
    assert panels.of(0) is first
    assert first.flat.nbytes == (math.ceil(8 / LANES) * LANES * 33 + math.ceil(19 / LANES) * LANES * 8) * 4
    panels.ranks.written(0, [4])
    assert panels.of(0) is not first
    assert sum(panels.of(0).ranks) == 4


def test_an_emptied_slot_leaves_no_panels():
    weights = made([], [(8,), (8,)]).weights
    memory = weakref.ref(weights.panels.of(1).flat)
    weights.ranks.written(1, [0])
    assert memory() is None
    assert weights.compiled({1: [0, 1, 2]}) == {}


# A processor with AVX-512 leaves its instructions out for the paths of others.
ELSEWHERE = build.ELEMENTS if "avx512f" in processor.this_processor().flags else ()


# Paths for processors that this machine may not be: registers of 16 numbers, and pairs multiplied at once.
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        ("float32", ["-DLANES_16"]),
        pytest.param("bfloat16", ["-DLANES_16"], marks=pytest.mark.nightly),
        pytest.param("bfloat16", ["-DDOT_IN_C"], marks=pytest.mark.nightly),
        ("bfloat16", ["-DDOT_IN_C", "-DLANES_16"]),
        *(
            pytest.param(dtype, ["-mno-avx512f"], marks=pytest.mark.nightly if dtype == "bfloat16" else [])
            for dtype in ELSEWHERE
        ),
        *((dtype, ["-mno-avx512f", "-DDOT_IN_C", "-DLANES_16"]) for dtype in ELSEWHERE if dtype == "bfloat16"),
        *((dtype, ["-mno-avx512bf16"]) for dtype in ELSEWHERE if dtype == "bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.usefixtures("fresh")
def test_other_processors_paths_are_right(monkeypatch, dtype, flags):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-Wno-psabi", *flags))
    for rows, ranks, inn, widths, parts in (
        (1, (1, 0), 7, (19, 3), 1),
        (2, (16, 16), 64, (64, 16), 2),
        (13, (5, 40), 513, (33, 70), 1),
        (100, (65, 7), 601, (300, 31), 1),
        (5, (63, 9), 601, (40, 31), 3),
        (3, (600, 1), 30, (40, 31), 1),
    ):
        check_two_adapters([-1, *[1] * rows, 0, 1], ranks, inn, widths, parts, getattr(torch, dtype))


def check_two_adapters(slot_of_row, ranks, inn, widths, parts, dtype) -> None:
    """Slot 1 points at an adapter of these ranks, of which a slot's copy would have 64 at most."""
    case = made(slot_of_row, [(3, 17), ranks], inn=inn, widths=widths, max_rank=600, dtype=dtype)
    panels = case.weights.panels
    case.weights.ranks.written(1, ranks)
    panels.place(1, panels.of(1))
    panels.product = dataclasses.replace(panels.product, parts=lambda *_: parts)
    case.check(scale=0.5)


ORDERS = {
    "neighbours": lambda rows: [1] * rows,
    "every third row": lambda rows: [1, 0, -1] * rows,
    "rows without a stride": lambda rows: [1, 0, 1, 1, -1] * (rows // 3) + [1] * (rows % 3),
}
AMX_BED = Path(__file__).with_name("amx_emulator.c")


@pytest.fixture(scope="module")
def emulated_amx(tmp_path_factory):
    """The product with AMX's instructions, and the emulator that they need here."""
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", AMX_BED, "-o", library], check=True, timeout=60)
    has_avx512 = processor.this_processor().has(processor.AVX512_BF16)
    flags = ["-Wno-psabi", *prebuilt.AMX, *([] if has_avx512 else ["-DDOT_IN_C", "-DLANES_16"])]
    product = product_of(build._compiled("-DELEMENT=BFLOAT16", *flags, str(prebuilt.SOURCE)))
    return product, ctypes.CDLL(str(library))


@pytest.fixture
def amx(monkeypatch, request):
    """The product multiplies with AMX: the processor's, or the emulator's."""
    if processor.this_processor().has(processor.AMX_BF16):
        yield
        return
    product, emulator = request.getfixturevalue("emulated_amx")
    monkeypatch.setattr(build, "product", lambda _: product)
    before = emulator.amx_multiplied()
    emulator.amx_start()
    yield
    emulator.amx_stop()
    assert emulator.amx_multiplied() > before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize(
    ("order", "threads"),
    [
        pytest.param(order, threads, id=f"{name}-{threads}", marks=[] if threads in few else pytest.mark.nightly)
        for few, (name, order) in zip(({1}, {1}, {1, 2}), ORDERS.items(), strict=True)
        for threads in THREADS.values()
    ],
    indirect=["threads"],
)
@pytest.mark.usefixtures("amx", "threads")
def test_amx_computes_every_shape(order):
    for rows, ranks, inn, widths, parts in (
        (5, (7, 40), 513, (33, 70), 1),  # an odd sum, and columns within a register
        (16, (16, 16), 320, (64, 16), 2),
        (33, (16, 96), 320, (300, 31), 1),
        (40, (600, 9), 70, (40, 31), 1),  # a sum in three, in steps of 16 and of 11 pairs
        (97, (34, 7), 64, (40, 31), 3),  # 17 pairs: no step divides them
    ):
        check_two_adapters(order(rows), ranks, inn, widths, parts, torch.bfloat16)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, pytest.param(-torch.inf, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("amx")
def test_amx_keeps_non_finite_numbers_to_their_rows(bad):
    slot_of_row = [0] * 20 + [1, -1, 0] * 20
    case = made(slot_of_row, [(16,), (16,)], inn=64, widths=(40,), dtype=torch.bfloat16)
    case.weights.a[0][0, 0, 3, 5] = bad
    case.x[1] = 0
    case.x[5] = bad
    y = case.outputs()
    found, expected = case.computed(y), case.expected(y)
    of_others = [row for row, slot in enumerate(slot_of_row) if slot == 1]
    assert_equal(found[of_others], expected[of_others], y[of_others], [1] * len(of_others))
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction of x86-64")
def test_avx512_bf16_is_multiplied_with_its_instruction(tmp_path):
    """In the wheel's object; in long runs also in what this file's other tests run, where the processor has it."""
    has_it = processor.this_processor().has(processor.AVX512_BF16)
    for flags in ("-march=x86-64-v4", "-mavx512bf16"), *([()] if has_it and IS_LONG else []):
        assembly = tmp_path / "lora.s"
        command = ["gcc", *build.FLAGS, *flags, "-DELEMENT=BFLOAT16", "-S"]
        subprocess.run([*command, str(prebuilt.SOURCE), "-o", str(assembly)], check=True, timeout=300)
        text = assembly.read_text()
        assert "vdpbf16ps" in text
        products = re.sub(r"(?ms)^turn:.*?^\t\.size\tturn", "", text)  # vectors are of float32
        assert "vfmadd" not in products


@pytest.mark.usefixtures("fresh")
def test_without_compiler_or_temporary_directory_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.problem() == "no C compiler is on the PATH (cc, gcc, clang)"
    with pytest.raises(build.CannotCompile, match="no C compiler"):
        build.product("float32")
    monkeypatch.undo()
    forget_what_was_built()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "no temporary directory" in build.problem()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'lora.c:3:1: error: no such luck' >&2; exit 1", "failed: lora.c:3:1: error: no such luck"),
        ("exit 3", "failed: no message"),
        (
            "while [ $1 != -o ]; do shift; done; echo nonsense > $2",
            "cannot be loaded from TMPDIR (is it mounted noexec?)",
        ),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, script, says):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert says in build.problem()


@pytest.mark.usefixtures("fresh")
def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert build.problem() is None
    assert list(tmp_path.iterdir()) == []
