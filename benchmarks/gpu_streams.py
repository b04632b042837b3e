"""Slots written on a side stream while a captured graph computes with others: `python -m benchmarks.gpu_streams`.

What a server does in `worker/`: an adapter is copied from pinned host memory into a slot on a side stream, its ranks
are filled on the device, the engine's stream waits for that, and the next batch uses the slot. The same graph replays
all the while. Here both streams are those of the product (`SlotStream`, `exact_set_lora`, `watch`), and every step's
output is compared bit for bit with a run in which nothing is written meanwhile. Sleeps on either stream widen what
could overlap. Two controls leave out one wait each and must fail, else this proves nothing.

Writes streams.json under --out or $OUT. Ends with 1 if a run with the waits differs, or a control does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_result
from benchmarks.gpu_device import Gpu, device

BUSY, RESERVED = 4, 2  # slots that compute all the time, and those that are written meanwhile
RANKS = (16, 64, 8, 33, 5, 48)
SLOT_RANK = 64


@dataclass(frozen=True)
class Shape:
    layers: int
    n_in: int
    widths: tuple[int, ...]
    rows: int
    steps: int
    beside: int  # batches of each step that use the busy slots alone
    sleep_us: float


FULL = Shape(layers=8, n_in=4096, widths=(4096, 1024, 1024), rows=64, steps=10, beside=16, sleep_us=2000.0)
SMALL = Shape(layers=2, n_in=48, widths=(32, 16), rows=12, steps=4, beside=2, sleep_us=50.0)


class Layer:
    """As much of one of vLLM's layers as the product's slot writing touches."""

    def __init__(self, shape: Shape, on: Any, torch: Any, slots: int) -> None:
        self.n_slices, self.tp_size = len(shape.widths), 1
        self.lora_a_stacked = tuple(
            torch.zeros(slots, 1, SLOT_RANK, shape.n_in, dtype=torch.bfloat16, device=on) for _ in shape.widths
        )
        self.lora_b_stacked = tuple(
            torch.zeros(slots, 1, width, SLOT_RANK, dtype=torch.bfloat16, device=on) for width in shape.widths
        )

    def whole_set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        raise AssertionError("these weights fill the slot's width")

    def whole_reset_lora(self, index: int) -> None:
        for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
            stack[index] = 0


def layer_class() -> type[Layer]:
    """`Layer` with the `set_lora` and `reset_lora` that the product gives vLLM's layers."""
    from lora_plugins.worker.slot_copy import exact_reset_lora, exact_set_lora

    class Exact(Layer):
        set_lora = exact_set_lora(lambda self, index, a, b: self.whole_set_lora(index, a, b))
        reset_lora = exact_reset_lora(lambda self, index: self.whole_reset_lora(index))

    return Exact


class World:
    """Layers, adapters in pinned host memory, one captured graph over all layers."""

    def __init__(self, shape: Shape, gpu: Gpu, table: Any) -> None:
        import torch

        from lora_plugins.kernels import layers
        from lora_plugins.kernels.triton_ops import operators
        from lora_plugins.kernels.triton_ops.operators import Batch

        torch.manual_seed(0)
        self.shape, self.gpu, self.torch = shape, gpu, torch
        self.slots = BUSY + RESERVED
        self.operators = operators.Operators(table)
        operators.use(self.operators)
        make = layer_class()
        self.layers = [make(shape, gpu.device, torch, self.slots) for _ in range(shape.layers)]
        for layer in self.layers:
            watched = layers.watch(layer)
            assert watched
            self.operators.register(*watched)
        self.adapters = [self._adapter(rank) for rank in (*RANKS, *RANKS[::-1])]
        self.batch = Batch(shape.rows, self.slots, gpu.device)
        self.x = torch.randn(shape.rows, shape.n_in, device=gpu.device).to(torch.bfloat16)
        self.y = torch.zeros(shape.layers, shape.rows, sum(shape.widths), dtype=torch.bfloat16, device=gpu.device)
        # Every mapping that a step may use, on the device beforehand: its copy would wait for the stream.
        self.mappings = {
            reserved: torch.tensor(self.slot_of_row(with_reserved=reserved), device=gpu.device)
            for reserved in (False, True)
        }
        self.load(range(BUSY))
        self.use(with_reserved=False)
        gpu.synchronize()
        self.replay = gpu.captured(self._compute)

    def _adapter(self, rank: int) -> list[tuple[list[Any], list[Any]]]:
        torch = self.torch

        def pinned(*size: int) -> Any:
            made = torch.randn(*size).mul_(0.1).to(torch.bfloat16)
            return made if self.gpu.rehearsal else made.pin_memory()

        widths = self.shape.widths
        return [
            ([pinned(rank, self.shape.n_in) for _ in widths], [pinned(width, rank) for width in widths])
            for _ in range(self.shape.layers)
        ]

    def slot_of_row(self, *, with_reserved: bool) -> list[int]:
        """Rows take the busy slots in turn, base rows among them; where asked for, every third one a reserved slot."""
        return [
            BUSY + row // 3 % RESERVED if with_reserved and row % 3 == 0 else row % (BUSY + 1) - 1
            for row in range(self.shape.rows)
        ]

    def use(self, *, with_reserved: bool) -> None:
        """Give the current stream the next batch."""
        mapping = self.mappings[with_reserved]
        slots = set(range(self.slots if with_reserved else BUSY))
        self.gpu.enqueue(lambda: self.batch.cut(mapping, slots, base_rows=True))

    def load(self, adapters: Sequence[int]) -> None:
        """Put adapters into the slots of their number, on the current stream."""
        for number in adapters:
            self.write(number, number)

    def write(self, slot: int, adapter: int) -> None:
        """Copy one adapter into a slot, and fill in its ranks."""
        from lora_plugins.kernels.ranks import at_once

        with at_once():  # as the product's worker does
            for layer, (a, b) in zip(self.layers, self.adapters[adapter], strict=True):
                layer.set_lora(slot, a, b)

    def write_reserved(self, step: int) -> None:
        """Write what the reserved slots hold after this step."""
        for number in range(RESERVED):
            self.write(BUSY + number, adapter_of(step, number))

    def _compute(self) -> None:
        y_of = list(self.shape.widths)
        for layer, y in zip(self.layers, self.y, strict=True):
            y.zero_()
            self.torch.ops.lora_plugins.lora_linear(
                y,
                self.x,
                list(layer.lora_a_stacked),
                list(layer.lora_b_stacked),
                *self.batch.tensors,
                y_of,
                1.0,
                0,
                True,
            )

    def reset(self) -> None:
        """All slots as at the start, and everything done."""
        self.load(range(BUSY))
        for slot in range(BUSY, self.slots):
            for layer in self.layers:
                layer.reset_lora(slot)
        self.gpu.synchronize()


def adapter_of(step: int, reserved: int) -> int:
    """Which adapter a reserved slot gets in a step; neighbouring steps and slots have different ones."""
    return (BUSY + step * RESERVED + reserved) % (2 * len(RANKS))


def outputs(
    world: World, write: Callable[[int], None], before_use: Callable[[], None], main_sleep_us: float
) -> list[list[Any]]:
    """For every step the output of a batch that uses the reserved slots, then those of batches that do not.

    `write(step)` begins to write the reserved slots while the device still computes with them; `before_use()` comes
    before the next batch that uses them.
    """
    made: list[list[Any]] = []
    gpu = world.gpu
    for step in range(world.shape.steps):
        of_step: list[Any] = []
        made.append(of_step)

        def compute(of_step: list[Any] = of_step) -> None:
            gpu.enqueue(world.replay)
            gpu.enqueue(lambda: of_step.append(world.y.clone()))

        world.use(with_reserved=True)
        gpu.sleep(main_sleep_us)
        compute()
        write(step)
        world.use(with_reserved=False)
        for _ in range(world.shape.beside):
            compute()
        before_use()
    gpu.synchronize()
    return made


def alone(world: World) -> list[list[Any]]:
    """Everything on one stream, each write whole before the next launch."""

    def write(step: int) -> None:
        world.gpu.synchronize()
        world.write_reserved(step)
        world.gpu.synchronize()

    world.reset()
    return outputs(world, write, lambda: None, 0.0)


def beside(
    world: World,
    *,
    main_sleep_us: float,
    side_sleep_us: float,
    idle_wait: bool = True,
    written_wait: bool = True,
) -> list[list[Any]]:
    """Writes on the product's side stream, with its waits, or without one of them as a control."""
    import torch

    from lora_plugins.worker.slot_stream import SlotStream

    gpu, events = world.gpu, []
    stream = SlotStream(torch.device("cuda"))

    def write(step: int) -> None:
        idle = stream.idle_event() if idle_wait else torch.cuda.Event()  # nothing waits for one that is not recorded

        def copy() -> None:
            gpu.sleep(side_sleep_us)
            gpu.enqueue(lambda: world.write_reserved(step))

        events.append(_write_without_waiting(stream, torch, idle, copy))

    def before_use() -> None:
        if written_wait:
            stream.wait_for(events[-1])

    world.reset()
    return outputs(world, write, before_use, main_sleep_us)


def _write_without_waiting(stream: Any, torch: Any, idle: Any, copy: Callable[[], None]) -> Any:
    """`SlotStream.write`, less the wait of its thread at the end, during which the engine's thread goes on."""
    from unittest import mock

    with mock.patch.object(torch.cuda, "Event", _without_synchronize(torch.cuda.Event)):
        return stream.write(idle, copy)


def _without_synchronize(event: Callable[[], Any]) -> Callable[[], Any]:
    class Event:
        """An event whose `synchronize` leaves the host free."""

        def __init__(self) -> None:
            self._event = event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._event, name)

        def synchronize(self) -> None:
            return

    return Event


def differing(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]], torch: Any) -> int:
    """How many outputs differ in a bit."""
    return sum(
        not torch.equal(a.view(torch.int16), b.view(torch.int16))
        for step, same_step in zip(one, other, strict=True)
        for a, b in zip(step, same_step, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = gpu_result.options("gpu_streams", 120.0).parse_args(argv)
    gpu = device(rehearse=options.rehearse)
    shape = SMALL if gpu.rehearsal else FULL
    until = time.monotonic() + options.seconds
    table = gpu.table()
    result = gpu_result.Result(
        options.out, "streams", {**gpu.facts(), "table": Path(table.origin).name}, rehearsal=gpu.rehearsal
    )
    right = proved(shape, gpu, table, result, until)
    result.finish(right=right)
    print("right" if right else "NOT PROVED", flush=True)
    return 0 if right else 1


def proved(shape: Shape, gpu: Gpu, table: Any, result: gpu_result.Result, until: float) -> bool:
    """Whether runs with the waits are equal bit for bit, and both controls differ; each row is kept as it comes."""
    with gpu.streams():
        world = World(shape, gpu, table)
        want = alone(world)
        with_reserved = [step[:1] for step in want]
        changing = differing(with_reserved[1:], with_reserved[:-1], gpu.torch)
        result.note(steps=shape.steps, batches_beside=shape.beside, sleep_us=shape.sleep_us, steps_that_differ=changing)
        right = changing == shape.steps - 1  # else a slot with old content would go unnoticed
        long, short = 3 * shape.sleep_us, shape.sleep_us / 10
        for name, how, equal in (
            ("as the product does it", {"main_sleep_us": 0, "side_sleep_us": short}, True),
            ("as the product does it, the copy late", {"main_sleep_us": 0, "side_sleep_us": long}, True),
            ("as the product does it, the batch late", {"main_sleep_us": long, "side_sleep_us": 0}, True),
            (
                "control: the engine's stream does not wait for the copy",
                {"main_sleep_us": 0, "side_sleep_us": long, "written_wait": False},
                False,
            ),
            (
                "control: the copy does not wait until the slot is idle",
                {"main_sleep_us": long, "side_sleep_us": 0, "idle_wait": False},
                False,
            ),
        ):
            if time.monotonic() > until:
                result.add({"run": name, "left out": "no time was left"})
                right = False
                continue
            differ = differing(want, beside(world, **how), gpu.torch)
            as_it_should = (differ == 0) is equal
            right = right and as_it_should
            result.add({"run": name, "outputs": sum(map(len, want)), "differ": differ, "right": as_it_should})
    return right


if __name__ == "__main__":
    sys.exit(main())
