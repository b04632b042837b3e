"""What the profile of a decoding step makes of its timers."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from benchmarks.kernels.profile import MODES, PARTS, Timers, print_profile, reader, split
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.compiled.library import Group, Work
from tests.kernels.common import make_case


def test_parts_of_a_layer_add_up_to_its_fastest_step() -> None:
    whole = [
        {"whole": 20.0, "base": 10.0, "ours": 8.0, "product": 5.0},
        {"whole": 90.0, "base": 70.0, "ours": 16.0, "product": 9.0},
    ]
    parts = split(
        {
            "whole": whole,
            "without B": [{"product": 2.0}, {"product": 7.0}],
            "read": [{"product": 4.0}],
            "cached": [{"product": 1.0}],
        }
    )
    assert parts == {
        "base": 10.0,
        "shrink": 2.0,
        "expand": 3.0,
        "wrapper": 3.0,
        "layer": 2.0,
        "read": 4.0,
        "cached": 1.0,
    }
    assert tuple(parts) == PARTS


def test_a_shrink_is_never_longer_than_its_product() -> None:
    steps = {mode: [{"product": 3.0}] for mode in MODES[1:]}
    parts = split({"whole": [{"whole": 4.0, "base": 1.0, "ours": 2.0, "product": 1.0}], **steps})
    assert (parts["shrink"], parts["expand"]) == (1.0, 0.0)


def test_each_mode_calls_the_product_in_its_own_way() -> None:
    timers, seen = Timers(), []

    def add(address: int, x: int, y: int) -> None:
        work = Work.from_address(address)
        seen.append((y, [group.n_slices for group in (Group * work.n_groups).from_address(work.groups)]))

    groups = (Group * 2)(Group(n_slices=3), Group(n_slices=1))
    work = Work(groups=ctypes.addressof(groups), n_groups=2)
    product = timers.product(add, lambda *_: seen.append("read"), 77)
    for timers.mode in (*MODES, "whole"):
        product(ctypes.addressof(work), 1, 2)
    assert seen == [(2, [3, 1]), (2, [0, 0]), "read", (77, [3, 1]), (77, [3, 1]), (2, [3, 1])]


def test_steps_of_other_batches_are_not_kept() -> None:
    timers = Timers()
    layer = timers.layer("o_proj", timers.timed("base", lambda x: time.sleep(0.001)), rows=16)
    layer([0] * 16)
    layer([0])
    (step,) = timers.steps["o_proj"]["whole"]
    assert step["whole"] >= step["base"] >= 0.001


def test_a_floor_has_the_reading_and_a_call_a_layer(capsys) -> None:
    parts = dict.fromkeys(PARTS, 1e-6) | {"read": 150e-6, "expand": 698e-6}
    layers = {f"layers.{n}.o_proj": parts for n in range(2)}
    print_profile({"layers": layers, "bytes": 3_000_000, "call": 50e-6, "beyond": {"1": 2e-6}})
    assert "Floor 400 µs: 3.0 MB read at 10.0 GB/s, 2 calls of 50.0 µs. Floor / ours: 0.29" in capsys.readouterr().out


@pytest.mark.skipif(bool(build.problem()), reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reader_changes_nothing(dtype) -> None:
    case = make_case([0, 1, 0], [(8, 3), (5, 0)], widths=(40, 30), dtype=dtype, products="compiled")
    prepared, y = case.plan().alone, case.outputs()
    before = y.clone()
    reader(str(dtype).removeprefix("torch."))(prepared._address, case.x.data_ptr(), y.data_ptr())
    assert torch.equal(y, before)
