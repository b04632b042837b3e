"""Figures of verification.md#what-it-costs, and the bar of 20 ms for the event loop (R62): `make bench-verify`.

    python -m benchmarks.verify_cost          # seconds per adapter size and dtype, with and without the weights' pass
    python -m benchmarks.verify_cost --loop   # what an event loop notices of a header of 70,000 tensors

Each size is measured interleaved with a plain read of the same file (page cache warm), so the ratio holds on a noisy
machine. Adapters are read as a server does it: by a child process that runs already. With `--loop` a thread then
compares the tensors with the model, and how late the loop is meanwhile is what a request may wait for. Allocated
objects are frozen before, as vLLM's API server does at start. Prints a Markdown table, and keeps
benchmarks/results/verify_cost.json or verify_loop.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import event_loop
from benchmarks.adapters import write_adapter, write_sized_adapter
from benchmarks.record import keep
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ModelModules, ModulePlace
from lora_plugins.adapter.verify import fit_adapter
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.verification.children import children

REPEATS = 7
SIZES_MB = (20, 200, 1000)
LAYERS, EXPERTS, PARTS = 91, 128, ("gate_proj", "up_proj", "down_proj")  # of a large mixture of experts
EXPERT_WIDTH = 2


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def plain_read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def costs(directory: Path, size_mb: int, dtype: str, repeats: int) -> dict:
    write_sized_adapter(directory, size_mb, dtype)
    weights = directory / "adapter_model.safetensors"
    whole = Settings(base_match=BaseMatch.OFF)
    header_only = Settings(base_match=BaseMatch.OFF, check_finite=False)
    jobs: dict[str, Callable[[], object]] = {
        "read_s": lambda: plain_read(weights),
        "header_s": lambda: children().read(directory, header_only).result(),
        "verify_s": lambda: children().read(directory, whole).result(),
    }
    times: dict[str, list[float]] = {job: [] for job in jobs}
    for _ in range(repeats):
        for job, work in jobs.items():
            times[job].append(timed(work))
    medians = {job: statistics.median(values) for job, values in times.items()}
    return {"dtype": dtype, "bytes": weights.stat().st_size, **medians, "all": times}


def table(rows: list[dict]) -> str:
    lines = ["| weights | plain read | without the pass | whole verification | GB/s | verification / read |"]
    lines += [
        f"| {row['bytes'] / 1e6:.0f} MB {row['dtype']} | {row['read_s'] * 1e3:.0f} ms "
        f"| {row['header_s'] * 1e3:.1f} ms | {row['verify_s'] * 1e3:.0f} ms "
        f"| {row['bytes'] / row['verify_s'] / 1e9:.1f} | {row['verify_s'] / row['read_s']:.1f} |"
        for row in rows
    ]
    return "\n".join([lines[0], "|---" * 6 + "|", *lines[1:]])


def of_experts(directory: Path) -> BaseModel:
    """Write an adapter of every expert, with the smallest tensors; returns the model that it fits."""
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)]
    modules = [f"{expert}.{part}" for expert in experts for part in PARTS]
    piece, shape = np.zeros(EXPERT_WIDTH, np.uint16), (EXPERT_WIDTH, EXPERT_WIDTH)
    write_adapter(directory, dict.fromkeys(modules, shape), 1, lambda _: piece, dtype="BF16")
    places = {module: ModulePlace(module, in_features=EXPERT_WIDTH, out_features=EXPERT_WIDTH) for module in modules}
    return BaseModel("base", model=Model(ModelModules("Moe", "", places), _read_name))


def _read_name(tensor: str) -> tuple[str, bool]:
    module, _, side = tensor.removeprefix("base_model.model.").rpartition(".lora_")
    return module, side == "A.weight"


def loop_rows(home: Path, repeats: int) -> list[dict]:
    """How late the loop is beside nothing, and beside a verification."""
    base, settings = of_experts(home), Settings(check_finite=False)

    async def verified() -> None:
        found = await asyncio.wrap_future(children().read(home, settings))
        await asyncio.to_thread(fit_adapter, found.adapter, base, settings, home)

    gc.collect()
    gc.freeze()
    rows = []
    for what, work in (("nothing", lambda: asyncio.sleep(1)), ("verification", verified)):
        runs = [asyncio.run(event_loop.timed(work)) for _ in range(repeats)]
        took_s, _, late_s, cpu_s = (statistics.median(values) for values in zip(*runs, strict=True))
        late_ms = [1e3 * run[2] for run in runs]
        rows.append({"beside": what, "took_s": took_s, "late_ms": 1e3 * late_s, "late_cpu_ms": 1e3 * cpu_s,
                     "late_of_each_run_ms": late_ms})  # fmt: skip
    return rows


def loop_table(rows: list[dict]) -> str:
    lines = [
        f"| {row['beside']} | {row['took_s']:.1f} s | {row['late_ms']:.0f} ms | {row['late_cpu_ms']:.0f} ms |"
        for row in rows
    ]
    return "\n".join(["| meanwhile | takes | loop late | of which CPU |", "|---" * 4 + "|", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", action="store_true", help="how late an event loop is, in the place of seconds")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MB, help="MB")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.loop:
            rows = loop_rows(Path(name), options.repeats)
        else:
            rows = [
                costs(Path(name), size, dtype, options.repeats) for dtype in ("BF16", "F32") for size in options.sizes
            ]
    print(loop_table(rows) if options.loop else table(rows))
    if not options.dry:
        print(
            f"\nMedians of {options.repeats}; raw: {keep('verify_loop' if options.loop else 'verify_cost', rows).name}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
