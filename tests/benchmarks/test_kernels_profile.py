"""What the profile of a decoding step makes of its timers."""

from __future__ import annotations

import ctypes
import time

import pytest

from benchmarks.kernels_profile import PARTS, Timers, floor_s, split
from lora_plugins.kernels.compiled.library import Group, Work


def test_parts_of_a_layer_add_up_to_its_fastest_step() -> None:
    whole = [
        {"whole": 20.0, "base": 10.0, "ours": 8.0, "product": 5.0},
        {"whole": 90.0, "base": 70.0, "ours": 16.0, "product": 9.0},
    ]
    parts = split(whole, [{"product": 2.0}, {"product": 7.0}])
    assert parts == {"base": 10.0, "shrink": 2.0, "expand": 3.0, "wrapper": 3.0, "layer": 2.0}
    assert tuple(parts) == PARTS


def test_a_shrink_is_never_longer_than_its_product() -> None:
    parts = split([{"whole": 4.0, "base": 1.0, "ours": 2.0, "product": 1.0}], [{"product": 3.0}])
    assert (parts["shrink"], parts["expand"]) == (1.0, 0.0)


def test_every_second_round_leaves_out_the_products_with_b() -> None:
    timers, seen = Timers(), []

    def add(address: int) -> None:
        work = Work.from_address(address)
        seen.append([group.n_slices for group in (Group * work.n_groups).from_address(work.groups)])

    groups = (Group * 2)(Group(n_slices=3), Group(n_slices=1))
    work = Work(groups=ctypes.addressof(groups), n_groups=2)
    product = timers.product(add)
    for timers.is_whole in (True, False, True):
        product(ctypes.addressof(work))
    assert seen == [[3, 1], [0, 0], [3, 1]]


def test_steps_of_other_batches_are_not_kept() -> None:
    timers = Timers()
    layer = timers.layer("o_proj", timers.timed("base", lambda x: time.sleep(0.001)), rows=16)
    layer([0] * 16)
    layer([0])
    (step,) = timers.steps["o_proj", True]
    assert step["whole"] >= step["base"] >= 0.001


def test_a_floor_has_the_bytes_and_a_call_a_layer() -> None:
    assert floor_s(3_000_000, 10e9, 32, 2e-6) == pytest.approx(364e-6)
