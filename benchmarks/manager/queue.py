"""Goal of R64, 1.1 times vLLM's waits (docs/benchmarks/manager.md): `make bench-queue`.

Who waits how long for what, and what a step costs, in vLLM's scheduler alone and with our queue in it.

    python -m benchmarks.manager.queue [--keep]

- waits: vLLM's scheduler classes in virtual time, without workers. Floods of requests fill all rows, and adapters come
  beside, one request each. A step takes 50 ms; in vLLM a load takes 100 ms of the step, ours takes two steps more.
- steps: the real time of `schedule` and `update_from_output` while requests wait for adapters without a slot, or for
  the resume of their adapter; vLLM alone passes over each request in each step, and has no pauses of adapters.

With `--keep` the rows go to benchmarks/results/queue.json.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from benchmarks.record import keep
from lora_plugins import process as process_module
from lora_plugins.process import Process
from lora_plugins.scheduler.pauses import PauseMode
from lora_plugins.vllm_patches.engine_core.pausing import pause
from tests.vllm_patches.engine_bed import Engine, make_scheduler, request, vllm_config
from tests.worker.small_model import base_directory

STEP_S = 0.05
LOAD_S = 0.1  # of vLLM's step, where the step loads an adapter
UNTIL_S = 400.0
STEPS = 45
HOT = 100  # the flood's adapter


@dataclass(frozen=True)
class Mix:
    """A flood of the base model, or of a hot adapter, and `adapters` with one request each, `every_s` seconds."""

    name: str
    slots: int
    adapters: int
    every_s: float = 1.0
    burst: int = 200
    a_second: float = 8.0
    flood: int | None = None
    policy: str = "fcfs"
    max_cpu_loras: int = 64


MIXES = (
    Mix("flood of the base model, 20 adapters, 2 slots", 2, 20),
    Mix("flood of the base model, 40 adapters, 4 slots", 4, 40),
    Mix("flood of the base model, 6 adapters, 2 slots", 2, 6, every_s=5.0),
    Mix("short flood of the base model, 20 adapters, 2 slots", 2, 20, burst=40),
    Mix("flood of a hot adapter, 20 adapters, 2 slots", 2, 20, flood=HOT),
    Mix("flood of a hot adapter, 60 adapters, 8 slots, 8 in memory", 8, 60, every_s=0.5, flood=HOT, max_cpu_loras=8),
    Mix("flood of a hot adapter, 40 adapters, 1 slot", 1, 40, every_s=0.25, burst=60, flood=HOT),
    Mix("flood of the base model by priority, 40 adapters, 4 slots", 4, 40, policy="priority"),
)


def make_engine(base: Path, *, is_stock: bool, rows: int = 8, **config: Any) -> Engine:
    options = vllm_config(base, **config)
    options.scheduler_config.max_num_seqs = rows
    kind = options.scheduler_config.get_scheduler_cls() if is_stock else None
    return Engine(make_scheduler(options, kind, blocks=4000), is_instant=False)


def waits(base: Path, mix: Mix, *, is_stock: bool) -> dict[str, float]:
    """Seconds to the first token: the longest and the median of the adapters, and the flood's median."""
    now = [1000.0]
    with patch.object(time, "monotonic", lambda: now[0]):
        engine = make_engine(
            base, is_stock=is_stock, max_loras=mix.slots, max_cpu_loras=mix.max_cpu_loras, policy=mix.policy
        )
        came_at, first_at, loaded = dict[str, float](), dict[str, float](), set[int | None]()
        loras: dict[str, int | None] = {}
        owed, seen, came = float(mix.burst), 0, 0
        while now[0] < 1000.0 + UNTIL_S and sum(name.startswith("cold") for name in first_at) < mix.adapters:
            owed += mix.a_second * STEP_S
            new = [(f"flood-{len(came_at) + i}", mix.flood) for i in range(int(owed))]
            owed -= len(new)
            if came < mix.adapters and now[0] >= 1000.0 + (came + 1) * mix.every_s:
                came += 1
                new.append((f"cold-{came}", came))
            for name, lora in new:
                engine.scheduler.add_request(request(name, lora, tokens=20, arrival_time=now[0]))
                came_at[name] = now[0]
                loras[name] = lora
            read = {loras[name] for name in engine.step()} - {None} - loaded
            loaded |= read
            now[0] += STEP_S + LOAD_S * len(read) * is_stock
            for output in engine.outputs[seen:]:
                if output.new_token_ids:
                    first_at.setdefault(output.request_id, now[0])
            seen = len(engine.outputs)
    cold = [first_at.get(name, now[0]) - at for name, at in came_at.items() if name.startswith("cold")]
    flood = [first_at[name] - came_at[name] for name in first_at if name.startswith("flood")]
    return {"worst_s": max(cold), "median_s": median(cold), "flood_median_s": median(flood)}


def step_us(base: Path, *, held: int, paused: int, is_stock: bool) -> list[float]:
    """Microseconds of steps with eight adapters in eight slots and rows to spare, beside requests that may not run."""
    engine = make_engine(base, is_stock=is_stock, rows=16, max_loras=8, max_cpu_loras=16)
    scheduler, taken = engine.scheduler, list[float]()
    for number in range(1, 9):
        scheduler.add_request(request(f"runs-{number}", number, tokens=59))
    while not all(engine.tokens_of(f"runs-{number}") for number in range(1, 9)):
        engine.step()
    for number in range(1000, 1000 + paused):
        pause(scheduler, f"adapter-{number}", PauseMode.KEEP)
    for number in range(1000, 1000 + held + paused):
        scheduler.add_request(request(f"waits-{number}", number))
    for _ in range(STEPS):
        began = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        made = engine._run(output)
        ran = time.perf_counter()
        scheduler.update_from_output(output, made)
        taken.append((scheduled - began + time.perf_counter() - ran) * 1e6)
    return taken[5:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    process_module._process = Process()
    base = base_directory(Path(tempfile.mkdtemp()))
    rows: list[dict[str, object]] = []
    print("| overload | longest wait: vLLM | ours | ratio | median | flood's median |\n|---|---|---|---|---|---|")
    for mix in MIXES:
        stock, ours = (waits(base, mix, is_stock=is_stock) for is_stock in (True, False))
        ratios = {name: round(ours[name] / stock[name], 2) for name in stock}
        rows.append({"mix": str(mix), "vllm": stock, "ours": ours, "ratios": ratios})
        cells = [mix.name, f"{stock['worst_s']:.1f} s", f"{ours['worst_s']:.1f} s"]
        cells += [f"{ratios[name]:.2f}×" for name in ("worst_s", "median_s", "flood_median_s")]
        print(f"| {' | '.join(cells)} |", flush=True)
    gc.disable()
    print("\n| waiting requests | vLLM: p50 | p99 | ours: p50 | p99 |\n|---|---|---|---|---|")
    for name, held, paused in (("none", 0, 0), ("1,000", 1000, 0), ("5,000", 5000, 0), ("1,000 paused", 0, 1000)):
        row: dict[str, object] = {"waiting": name}
        cells = [name]
        for arm in ("vllm", "ours"):
            if arm == "vllm" and paused:
                cells += ["–", "–"]
                continue
            runs = [step_us(base, held=held, paused=paused, is_stock=arm == "vllm") for _ in range(5)]
            least = [min(step) for step in zip(*runs, strict=True)]
            row[arm] = {"p50_us": round(median(least), 1), "p99_us": round(quantiles(least, n=100)[98], 1)}
            cells += [f"{median(least):.0f} µs", f"{quantiles(least, n=100)[98]:.0f} µs"]
        rows.append(row)
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.keep:
        print(f"\nRaw: {keep('queue', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
