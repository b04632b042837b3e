"""Figure of docs/benchmarks/manager.md#activation, for R17.

Host to slot: what activating an adapter takes, against a plain copy of as many bytes.

In the process of a real engine with the real model, whose thread is bound as vLLM binds it. Turn about: one `copy_` of
one contiguous tensor of the adapter's size, vLLM's own way (every layer's `set_lora` of its class), and ours: copying
into the slot, and, in an engine with `lora_kernels`, pointing the slot at what was packed when the adapter was loaded.
The slot is written with another adapter of the same rank in between, as in a server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.manager import bed
from benchmarks.manager.arms import environment

ROUNDS = 15


def measure(pairs: Sequence[tuple[int, int]]) -> list[dict]:
    """A row for each (rank, max_lora_rank), each with and without our kernels in a separate process."""
    rows = []
    for rank, max_rank in pairs:
        row: dict = {}
        for arm in ("ours+kernels", "ours"):
            command = [sys.executable, "-m", "benchmarks.manager.activation", str(rank), str(max_rank)]
            child = subprocess.run(
                command, env={**os.environ, **environment(arm)}, stdout=subprocess.PIPE, check=True, text=True
            )
            found = json.loads(child.stdout.splitlines()[-1])
            row = (
                {"pointed_ms": found["ours_ms"], "pointed_ratio": found["ours_ratio"]} if not row else {**row, **found}
            )
        rows.append(row)
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        "| rank | max_lora_rank | adapter | plain copy | vLLM | copied | pointed | by plain: vLLM | copied | pointed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain, vllm, ours = (row[f"{name}_ms"] for name in ("plain", "vllm", "ours"))
        lines.append(
            f"| {row['rank']} | {row['max_rank']} | {row['size_bytes'] / 1e6:.0f} MB | {plain:.1f} ms | {vllm:.1f} ms "
            f"| {ours:.1f} ms | {row['pointed_ms']:.1f} ms "
            f"| {row['vllm_ratio']:.2f} | {row['ours_ratio']:.2f} | {row['pointed_ratio']:.2f} |"
        )
    return "\n".join(lines)


def _child(rank: int, max_rank: int) -> dict:
    import torch

    from benchmarks.manager.engine import engine
    from lora_plugins.scheduler.messages import AdapterSpec
    from lora_plugins.worker import slot_copy

    original = _vllms_own()
    with engine(bed.base_model(), max_lora_rank=max_rank, max_loras=2, max_cpu_loras=4) as manager:
        from vllm.lora.request import LoRARequest

        adapter = bed.adapter(bed.base_model(), rank)
        models = [manager._load_adapter(LoRARequest(f"a{i}", i, str(adapter))) for i in (1, 2)]
        slots = manager._adapter_manager
        for model in models:
            slots._create_merged_loras_inplace(model)
        loaded = [manager._read(AdapterSpec(i, f"a{i}", str(adapter)), str(adapter)) for i in (1, 2)]
        size_bytes = bed.size_bytes(adapter)
        source, target = (torch.ones(size_bytes // 4) for _ in range(2))

        def plain() -> None:
            target.copy_(source)

        def vllm(number: int) -> None:
            for name, module in slots.modules.items():
                weights = slots._get_lora_layer_weights(models[number % 2], name)
                if weights:
                    original(module)(module, 0, weights.lora_a, weights.lora_b)

        def ours(number: int) -> None:
            loaded[number % 2].write(0)

        def timed(work, *arguments) -> float:
            started = time.perf_counter()
            work(*arguments)
            return time.perf_counter() - started

        rounds = [
            (timed(plain), timed(vllm, n), _forget(slots, slot_copy), timed(ours, n), timed(ours, n + 1))
            for n in range(ROUNDS + 2)
        ]
        rounds = rounds[2:]
    return {
        "rank": rank,
        "max_rank": max_rank,
        "size_bytes": size_bytes,
        "plain_ms": statistics.median(r[0] for r in rounds) * 1e3,
        "vllm_ms": statistics.median(r[1] for r in rounds) * 1e3,
        "ours_first_ms": statistics.median(r[3] for r in rounds) * 1e3,  # over an unknown slot: the rest is zeroed
        "ours_ms": statistics.median(r[4] for r in rounds) * 1e3,
        "vllm_ratio": statistics.median(r[1] / r[0] for r in rounds),
        "ours_ratio": statistics.median(r[4] / r[0] for r in rounds),
    }


def _vllms_own():
    """vLLM's own `set_lora` of a layer, taken before any plugin replaces it."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    merged, single = MergedColumnParallelLinearWithLoRA.set_lora, BaseLinearLayerWithLoRA.set_lora
    reset = BaseLinearLayerWithLoRA.reset_lora

    def of(layer):
        whole = merged if isinstance(layer, MergedColumnParallelLinearWithLoRA) else single

        def set_lora(self, index, lora_a, lora_b):
            layer.reset_lora = reset.__get__(layer)  # vLLM's `set_lora` calls it
            try:
                whole(self, index, lora_a, lora_b)
            finally:
                del layer.reset_lora

        return set_lora

    return of


def _forget(slots, slot_copy) -> None:
    """vLLM's way was called past ours, so what ours knows of the slot is void."""
    for module in slots.modules.values():
        slot_copy.forget(module)


if __name__ == "__main__":
    output = os.dup(1)  # the engine prints too
    os.dup2(2, 1)
    row = _child(int(sys.argv[1]), int(sys.argv[2]))
    os.write(output, (json.dumps(row) + "\n").encode())
