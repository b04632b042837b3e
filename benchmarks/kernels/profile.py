"""Figures of docs/explanation/kernels.md#measured, where a step goes, for R28 and R30.

Where a decoding step goes: base products, our shrink and expand, and what is around them, layer by layer.

`python -m benchmarks.kernels.cpu --profile` starts this module as a process for each dtype, slot rank and number of
adapters. The engine runs within the process, and functions of the LoRA layers are timed while 16 sequences decode. A
layer's figure is that of its fastest step. Rounds of `MODES` follow each other: whole calls; calls without B, so that
the shrink is timed apart; calls that only read the adapters' panels; second calls, with panels in the caches. Most
rounds' answers are wrong, and nobody reads them. The products that PyTorch computes count as the wrapper's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lora_plugins.kernels.compiled import build, prebuilt
from lora_plugins.kernels.compiled.library import Group, Work

PARTS = ("base", "shrink", "expand", "wrapper", "layer", "read", "cached")
MODES = ("whole", "without B", "read", "cached")
GOALS = {"beyond_us": 3.0, "of_floor": 0.6}


class Timers:
    """Times the calls of wrapped functions; the numbers are seconds, by layer and by what was called."""

    def __init__(self) -> None:
        self.mode = MODES[0]
        self.now: dict[str, float] = defaultdict(float)
        self.steps: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **options)
            self.now[what] += time.perf_counter() - started
            return result

        return call

    def layer(self, name: str, apply: Callable[..., Any], rows: int) -> Callable[..., Any]:
        """Return `apply`, which keeps the times of its parts for batches of so many rows."""
        timed = self.timed("whole", apply)

        def call(x: Any, *arguments: Any) -> Any:
            self.now.clear()
            result = timed(x, *arguments)
            if len(x) == rows:
                self.steps[name][self.mode].append(dict(self.now))
            return result

        return call

    def product(self, add: Callable[..., None], read: Callable[..., None], beside: int) -> Callable[..., None]:
        """Return `add`, which does as `mode` says.

        Args:
            add: of `Product`.
            read: has the arguments of `add`, and only reads the panels.
            beside: address of memory as large as `y`, which takes the results of second calls.
        """
        timed, timed_read = self.timed("product", add), self.timed("product", read)

        def call(address: int, x: int, y: int) -> None:
            if self.mode == "whole":
                timed(address, x, y)
                return
            if self.mode == "read":
                timed_read(address, x, y)
                return
            if self.mode == "cached":
                add(address, x, beside)
                timed(address, x, beside)
                return
            work = Work.from_buffer_copy(Work.from_address(address))
            groups = (Group * work.n_groups).from_buffer_copy((Group * work.n_groups).from_address(work.groups))
            for group in groups:
                group.n_slices = 0
            work.groups = ctypes.addressof(groups)
            timed(ctypes.addressof(work), x, y)

        return call

    def parts(self) -> dict[str, dict[str, float]]:
        """Return each layer's seconds of a step, by the names in `PARTS`."""
        return {name: split(steps) for name, steps in self.steps.items()}


def split(steps: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the seconds of one layer's parts, from its steps in each of `MODES`."""

    def least(steps: list[dict[str, float]], of_step: Callable[[dict[str, float]], float]) -> float:
        return min(map(of_step, steps))  # what else runs on the machine only ever adds

    whole = steps["whole"]
    product, without_b, read, cached = (least(steps[mode], lambda step: step.get("product", 0.0)) for mode in MODES)
    shrink = min(product, without_b)
    return {
        "base": least(whole, lambda step: step["base"]),
        "shrink": shrink,
        "expand": product - shrink,
        "wrapper": least(whole, lambda step: step["ours"] - step.get("product", 0.0)),
        "layer": least(whole, lambda step: step["whole"] - step["base"] - step["ours"]),
        "read": read,
        "cached": cached,
    }


def reader(dtype: str) -> Callable[..., None]:
    """Return a function with the arguments of `Product.add`, which reads the panels and computes nothing."""
    source = Path(__file__).with_name("read.c")
    loaded = build._compiled(f"-DELEMENT={build.ELEMENTS[dtype]}", f"-I{prebuilt.SOURCE.parent}", str(source))
    loaded.lora_read.argtypes = [ctypes.c_void_p] * 3
    loaded.lora_read.restype = None
    return loaded.lora_read


def fastest(function: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def beyond_the_product(wrapper: Any, layer: Any, rows: int) -> float:
    """Return the seconds of a call of our wrapper in which the library computes nothing, with warm caches."""
    slots = wrapper._modules[id(layer.lora_a_stacked)]
    y = torch.zeros(rows, sum(layer.output_slices), dtype=slots.a[0].dtype)
    x = torch.zeros(rows, slots.a[0].shape[3], dtype=y.dtype)
    call = functools.partial(
        wrapper.add_lora_linear, y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices
    )
    call()
    wrapper._plans[id(layer.lora_a_stacked)].alone._work.n_groups = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no other thread is woken
    found = fastest(call, 2000)
    torch.set_num_threads(threads)
    wrapper._plans.clear()
    return found


def empty_call(product: Any) -> float:
    """Return the seconds of a call without an adapter: the threads are woken, and wait for each other."""
    work = Work(parts=1)
    return fastest(lambda: product.add(ctypes.addressof(work), None, None), 2000)


def profile(
    llm: Any, runs: Mapping[str, Callable[[str, int], Any]], rounds: int, rows: int
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each case: `runs[case]("decode", sequences)` decodes with the adapters of the case."""
    layers: dict[str, Any] = {}
    llm.apply_model(
        lambda model: layers.update(
            (name, module) for name, module in model.named_modules() if hasattr(module, "output_slices")
        )
    )
    first = next(iter(layers.values()))
    wrapper = first.punica_wrapper
    modules = [wrapper._modules[id(layer.lora_a_stacked)] for layer in layers.values()]
    figures: dict[str, dict[str, Any]] = {}
    for case, run in runs.items():
        beyond = {}
        for n in (1, rows):
            run("decode", n)
            beyond[n] = beyond_the_product(wrapper, first, n)
        read = sum(slots.panels.of(slot).flat.nbytes for slots in modules for slot in wrapper._batch.rows)
        figures[case] = {"beyond": beyond, "bytes": read, "call": empty_call(modules[0].panels.product)}
    timers = Timers()
    dtype = modules[0].a[0].dtype
    read_panels = reader(str(dtype).removeprefix("torch."))
    beside = torch.zeros(rows, max(sum(slots.panels.shape.widths) for slots in modules), dtype=dtype)
    for slots in modules:
        add = timers.product(slots.panels.product.add, read_panels, beside.data_ptr())
        slots.panels.product = dataclasses.replace(slots.panels.product, add=add)
    wrapper.add_lora_linear = timers.timed("ours", wrapper.add_lora_linear)
    for name, layer in layers.items():
        layer.apply = timers.layer(name, layer.apply, rows)
        layer.base_layer.quant_method.apply = timers.timed("base", layer.base_layer.quant_method.apply)
    for case, run in runs.items():
        timers.steps.clear()
        wrapper._plans.clear()
        for number in range(len(MODES) * rounds):
            timers.mode = MODES[number % len(MODES)]
            run("decode", rows)
        yield {"case": case, **figures[case], "layers": timers.parts()}


def print_profile(figures: dict[str, Any]) -> None:
    """Print microseconds of a step for each kind of layer, and what is said of the whole step."""
    kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, parts in figures["layers"].items():
        kinds[name.rpartition(".")[2]].append(parts)
    kinds["all"] = list(figures["layers"].values())
    print(f"| layers | {' | '.join(PARTS)} |\n|---|{'---|' * len(PARTS)}")
    for kind, found in kinds.items():
        cells = (f"{sum(parts[part] for parts in found) * 1e6:.0f}" for part in PARTS)
        print(f"| {len(found)} × {kind} | {' | '.join(cells)} |")
    ours = sum(parts[part] for parts in kinds["all"] for part in PARTS[1:4])
    read = sum(parts["read"] for parts in kinds["all"])
    least = read + len(kinds["all"]) * figures["call"]
    speed = f"{figures['bytes'] / 1e6:.1f} MB read at {figures['bytes'] / read / 1e9:.1f} GB/s"
    calls = f"{len(kinds['all'])} calls of {figures['call'] * 1e6:.1f} µs"
    of_floor = f"{least / ours:.2f} (goal {GOALS['of_floor']})"
    print(f"\nFloor {least * 1e6:.0f} µs: {speed}, {calls}. Floor / ours: {of_floor}.")
    # JSON made texts of the numbers of rows.
    beyond = ", ".join(f"{rows} rows {s * 1e6:.1f} µs" for rows, s in figures["beyond"].items())
    print(f"A call beyond the product: {beyond} (goal {GOALS['beyond_us']:.0f}).\n")
