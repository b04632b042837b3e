"""Host to slot without an engine, layer by layer, against a plain copy of the bytes.

Stacks and adapters of the shapes of the benchmark's model (36 layers, 340 M parameters), one thread as vLLM binds it.
Turn about in one process; the slot is written with another adapter of the same rank in between. A ratio is that of the
same round's plain copy, the median of the rounds, and beside it that of the fastest rounds.
`python -m benchmarks.manager.copies` prints Markdown and keeps benchmarks/results/activation_copies.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from benchmarks.manager.bed import HIDDEN, LAYERS
from benchmarks.record import keep
from lora_plugins.worker.host_memory import ALIGNMENT, Block
from lora_plugins.worker.slot_copy import exact_set_lora

PAIRS = [(16, 16), (64, 64), (256, 256), (16, 64), (16, 256), (64, 256)]
SHAPES = (  # inputs, and outputs of each slice, as of `bed.base_model`
    (HIDDEN, (HIDDEN, HIDDEN // 2, HIDDEN // 2)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (2 * HIDDEN, 2 * HIDDEN)),
    (2 * HIDDEN, (HIDDEN,)),
)
WAYS = ("plain", "layers")


def unused(*_: object) -> None:
    raise AssertionError("vLLM's way is not needed")


class Layer:
    tp_size = 1
    set_lora = exact_set_lora(unused)

    def __init__(self, inn: int, outs: tuple[int, ...], max_rank: int) -> None:
        self.n_slices = len(outs)
        self.lora_a_stacked = tuple(torch.zeros(3, 1, max_rank, inn) for _ in outs)
        self.lora_b_stacked = tuple(torch.zeros(3, 1, out, max_rank) for out in outs)


def adapter(layers: list[Layer], rank: int, size_bytes: int) -> list[tuple[Layer, list, list]]:
    """Random weights for every layer, in one block of memory as a loaded adapter has them."""
    block = Block(size_bytes + ALIGNMENT * 6 * len(layers))
    return [
        (
            layer,
            [block.copy(torch.randn(rank, a.shape[3])) for a in layer.lora_a_stacked],
            [block.copy(torch.randn(b.shape[2], rank)) for b in layer.lora_b_stacked],
        )
        for layer in layers
    ]


def measure(rank: int, max_rank: int, rounds: int) -> dict:
    layers = [Layer(inn, outs, max_rank) for _ in range(LAYERS) for inn, outs in SHAPES]
    size_bytes = 4 * rank * LAYERS * sum(inn * len(outs) + sum(outs) for inn, outs in SHAPES)
    adapters = [adapter(layers, rank, size_bytes) for _ in range(2)]
    source, target = torch.ones(size_bytes // 4), torch.ones(size_bytes // 4)

    def one_by_one(number: int) -> None:
        for layer, a, b in adapters[number]:
            layer.set_lora(0, a, b)

    ways = {"plain": lambda _: target.copy_(source), "layers": one_by_one}
    found = []
    for number in range(rounds + 2):
        row = {}
        for name, way in ways.items():
            started = time.perf_counter()
            way(number % 2)
            row[name] = time.perf_counter() - started
        found.append(row)
    found = found[2:]
    best = {name: min(row[name] for row in found) for name in WAYS}
    return {
        "rank": rank, "max_rank": max_rank, "size_bytes": size_bytes, "rounds": rounds, "load": os.getloadavg()[0],
        **{f"{name}_ms": best[name] * 1e3 for name in WAYS},
        **{f"{name}_ratio": statistics.median(row[name] / row["plain"] for row in found) for name in WAYS[1:]},
        **{f"{name}_best_ratio": best[name] / best["plain"] for name in WAYS[1:]},
    }  # fmt: skip


def main() -> int:
    torch.set_num_threads(1)
    rows = []
    print("| rank | max_lora_rank | adapter | plain copy | layer by layer | by plain | load |")
    print("|---|---|---|---|---|---|---|")
    for rank, max_rank in PAIRS:
        row = measure(rank, max_rank, max(8, 640 // rank))
        rows.append(row)
        times = " | ".join(f"{row[f'{name}_ms']:.1f} ms" for name in WAYS)
        ratios = " | ".join(f"{row[f'{name}_ratio']:.2f} ({row[f'{name}_best_ratio']:.2f})" for name in WAYS[1:])
        print(
            f"| {rank} | {max_rank} | {row['size_bytes'] / 1e6:.0f} MB | {times} | {ratios} | {row['load']:.0f} |",
            flush=True,
        )
    print(f"\nRaw: {keep('activation_copies', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
