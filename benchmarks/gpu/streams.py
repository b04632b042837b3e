"""Goal of R18 on a GPU, of docs/explanation/kernels-gpu.md.

Slots written on a side stream while a captured graph computes with others.

What a server does in `worker/`: an adapter is copied from pinned host memory into a slot on a side stream, its ranks
are filled on the device, the engine's stream waits for that, and the next batch uses the slot. The same graph replays
all the while. Here both streams are those of the product (`SlotStream`, `exact_set_lora`, `watch`), and every step's
output is compared bit for bit with a run in which nothing is written meanwhile. Sleeps on either stream widen what
could overlap. Two controls leave out one wait each and must fail, else this proves nothing. Writes streams.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.session import Result, Session

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


def layer_class() -> type:
    """As much of one of vLLM's layers as slot writing touches, with the methods that the product gives these."""
    from lora_plugins.worker.slot_copy import exact_reset_lora, exact_set_lora

    class Layer:
        tp_size = 1

        def __init__(self, shape: Shape, empty: Callable[..., Any]) -> None:
            self.n_slices = len(shape.widths)
            self.lora_a_stacked = tuple(empty(1, SLOT_RANK, shape.n_in) for _ in shape.widths)
            self.lora_b_stacked = tuple(empty(1, width, SLOT_RANK) for width in shape.widths)

        def whole_set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
            raise AssertionError("these weights fill the slot's width")

        def whole_reset_lora(self, index: int) -> None:
            for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
                stack[index] = 0

        set_lora = exact_set_lora(whole_set_lora)
        reset_lora = exact_reset_lora(whole_reset_lora)

    return Layer


class World:
    """Layers, adapters in pinned host memory, one captured graph over all layers."""

    def __init__(self, shape: Shape, session: Session) -> None:
        from lora_plugins.kernels import layers
        from lora_plugins.kernels.triton_ops.operators import Batch

        self.shape, self.gpu, self.torch = shape, session.gpu, session.gpu.torch
        torch, on = self.torch, {"dtype": self.torch.bfloat16, "device": self.gpu.device}
        torch.manual_seed(0)
        self.slots = BUSY + RESERVED
        layer = layer_class()
        self.layers = [layer(shape, lambda *size: torch.zeros(self.slots, *size, **on)) for _ in range(shape.layers)]
        for made in self.layers:
            watched = layers.watch(made)
            assert watched
            session.made.register(*watched)
        self.adapters = [self._adapter(rank) for rank in (*RANKS, *RANKS[::-1])]
        self.batch = Batch(shape.rows, self.slots, self.gpu.device)
        self.x = torch.randn(shape.rows, shape.n_in, device=self.gpu.device).to(torch.bfloat16)
        self.y = torch.zeros(shape.layers, shape.rows, sum(shape.widths), **on)
        # Every mapping that a step may use, on the device beforehand: its copy would wait for the stream.
        self.mappings = [torch.tensor(self.slot_of_row(reserved), device=self.gpu.device) for reserved in (False, True)]
        for slot in range(BUSY):
            self.write(slot, slot)
        self.use(with_reserved=False)
        self.gpu.synchronize()
        self.replay = self.gpu.captured(self._compute)

    def _adapter(self, rank: int) -> list[tuple[list[Any], list[Any]]]:
        def pinned(*size: int) -> Any:
            made = self.torch.randn(*size).mul_(0.1).to(self.torch.bfloat16)
            return made if self.gpu.rehearsal else made.pin_memory()

        widths = self.shape.widths
        return [
            ([pinned(rank, self.shape.n_in) for _ in widths], [pinned(width, rank) for width in widths])
            for _ in range(self.shape.layers)
        ]

    def slot_of_row(self, with_reserved: bool) -> list[int]:
        """Rows take the busy slots in turn, base rows among them; where asked for, every third one a reserved slot."""
        return [
            BUSY + row // 3 % RESERVED if with_reserved and row % 3 == 0 else row % (BUSY + 1) - 1
            for row in range(self.shape.rows)
        ]

    def use(self, *, with_reserved: bool) -> None:
        """Give the current stream the next batch."""
        mapping, slots = self.mappings[with_reserved], set(range(self.slots if with_reserved else BUSY))
        self.gpu.enqueue(lambda: self.batch.cut(mapping, slots, base_rows=True))

    def write(self, slot: int, adapter: int) -> None:
        """Copy one adapter into a slot, and fill in its ranks, on the current stream."""
        from lora_plugins.kernels.slot_ranks import at_once

        with at_once():  # as the product's worker does
            for layer, (a, b) in zip(self.layers, self.adapters[adapter], strict=True):
                layer.set_lora(slot, a, b)

    def write_reserved(self, step: int) -> None:
        """Write what the reserved slots hold after this step; neighbouring steps and slots have different adapters."""
        for number in range(RESERVED):
            self.write(BUSY + number, (BUSY + step * RESERVED + number) % len(self.adapters))

    def _compute(self) -> None:
        linear = self.torch.ops.lora_plugins.lora_linear
        for layer, y in zip(self.layers, self.y, strict=True):
            stacks = list(layer.lora_a_stacked), list(layer.lora_b_stacked)
            y.zero_()
            linear(y, self.x, *stacks, *self.batch.tensors, list(self.shape.widths), 1.0, 0, True)

    def reset(self) -> None:
        """The reserved slots as at the start, and everything done."""
        for layer in self.layers:
            for slot in range(BUSY, self.slots):
                layer.reset_lora(slot)
        self.gpu.synchronize()


def outputs(
    world: World, write: Callable[[int], None], before_use: Callable[[], None], main_sleep_us: float
) -> list[list[Any]]:
    """For every step the output of a batch that uses the reserved slots, then those of batches that do not.

    `write(step)` begins to write the reserved slots while the device still computes with them; `before_use()` comes
    before the next batch that uses them.
    """
    world.reset()
    made: list[list[Any]] = [[] for _ in range(world.shape.steps)]
    gpu = world.gpu
    for step, of_step in enumerate(made):

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

    return outputs(world, write, lambda: None, 0.0)


def beside(
    world: World, main_sleep_us: float, side_sleep_us: float, *, idle_wait: bool = True, written_wait: bool = True
) -> list[list[Any]]:
    """Writes on the product's side stream, with its waits, or without one of them as a control."""
    from lora_plugins.worker.slot_stream import SlotStream

    gpu, cuda, written = world.gpu, world.torch.cuda, []
    stream = SlotStream(world.torch.device("cuda"))

    def write(step: int) -> None:
        idle = stream.idle_event() if idle_wait else cuda.Event()  # nothing waits for one that is not recorded

        def copy() -> None:
            gpu.sleep(side_sleep_us)
            gpu.enqueue(lambda: world.write_reserved(step))

        stream.write(idle, copy)
        written.append(stream.written_event())

    def before_use() -> None:
        if written_wait:
            stream.wait_for(written[-1])

    return outputs(world, write, before_use, main_sleep_us)


def differing(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]], torch: Any) -> int:
    """How many outputs differ in a bit."""
    return sum(
        not torch.equal(a.view(torch.int16), b.view(torch.int16))
        for step, same_step in zip(one, other, strict=True)
        for a, b in zip(step, same_step, strict=True)
    )


def run(session: Session) -> bool:
    """Whether it is proved."""
    result = session.result("streams")
    right = proved(SMALL if session.gpu.rehearsal else FULL, session, result)
    result.finish(right=right)
    print("right" if right else "NOT PROVED", flush=True)
    return right


def proved(shape: Shape, session: Session, result: Result) -> bool:
    """Whether runs with the waits are equal bit for bit, and both controls differ; each row is kept as it comes.

    A rehearsal does everything at once: there a control cannot differ, and is left out.
    """
    gpu, late = session.gpu, 3 * shape.sleep_us
    runs: dict[str, tuple[float, float, dict[str, bool]]] = {
        "as the product does it": (0.0, shape.sleep_us / 10, {}),
        "as the product does it, the copy late": (0.0, late, {}),
        "as the product does it, the batch late": (late, 0.0, {}),
    }
    if not gpu.does_all_at_once:
        runs |= {
            "control: the engine's stream does not wait for the copy": (0.0, late, {"written_wait": False}),
            "control: the copy does not wait until the slot is idle": (late, 0.0, {"idle_wait": False}),
        }
    with gpu.streams():
        world = World(shape, session)
        want = alone(world)
        changing = differing([step[:1] for step in want[1:]], [step[:1] for step in want[:-1]], gpu.torch)
        result.note(steps=shape.steps, batches_beside=shape.beside, sleep_us=shape.sleep_us, steps_that_differ=changing)
        right = changing == shape.steps - 1  # else a slot with old content would go unnoticed
        for name, (main_us, side_us, left_out) in runs.items():
            if session.is_over:
                result.add({"run": name, "left out": "no time was left"})
                return False
            differ = differing(want, beside(world, main_us, side_us, **left_out), gpu.torch)
            is_right = (differ == 0) is not bool(left_out)
            result.add({"run": name, "outputs": sum(map(len, want)), "differ": differ, "right": is_right})
            right = right and is_right
    return right
