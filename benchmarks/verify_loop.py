"""What an event loop notices of a header of 70,000 tensors that a child process reads and a thread compares.

A task of the loop sleeps for a millisecond again and again; the longest time between two of its turns is the gap that a
request may meet. What was allocated before is frozen, as vLLM's API server does at start. Prints a Markdown table and
keeps the raw figures in benchmarks/results/verify_loop.json.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import keep
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ModelModules, ModulePlace
from lora_plugins.adapter.verify import fit_adapter
from lora_plugins.settings import Settings
from lora_plugins.verification.children import children

REPEATS = 7
LAYERS, EXPERTS = 91, 128
PARTS = ("gate_proj", "up_proj", "down_proj")


def write_adapter(directory: Path) -> BaseModel:
    """An adapter of every expert of a large MoE model, with the smallest tensors, and the model."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part in PARTS
    ]
    header, at = {}, 0
    for module in modules:
        for side, shape in (("A", [1, 2]), ("B", [2, 1])):
            begin, at = at, at + 4
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, at]}
            header[f"base_model.model.{module}.lora_{side}.weight"] = entry
    raw = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": list(PARTS)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    places = {module: ModulePlace(module, in_features=2, out_features=2) for module in modules}
    return BaseModel("base", model=Model(ModelModules("Moe", "", places), _read_name))


def _read_name(tensor: str) -> tuple[str, bool]:
    module, _, side = tensor.removeprefix("base_model.model.").rpartition(".lora_")
    return module, side == "A.weight"


async def gaps_beside(directory: Path | None, base: BaseModel) -> tuple[float, list[float]]:
    """Seconds that it took, and all gaps between turns of the loop; without a directory, of a second of rest."""
    gaps: list[float] = []
    is_over = False

    async def turn() -> None:
        last = time.perf_counter()
        while not is_over:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0.2)
    gaps.clear()
    started = time.perf_counter()
    if directory is None:
        await asyncio.sleep(1)
    else:
        settings = Settings(check_finite=False)
        found = await asyncio.wrap_future(children().read(directory, settings))
        await asyncio.to_thread(fit_adapter, found.adapter, base, settings)
    took_s = time.perf_counter() - started
    is_over = True
    await turning
    return took_s, sorted(gaps)


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        base = write_adapter(Path(name))
        gc.collect()
        gc.freeze()
        for what, directory in (("nothing", None), ("verification", Path(name))):
            runs = [asyncio.run(gaps_beside(directory, base)) for _ in range(REPEATS)]
            row = {
                "beside": what,
                "took_s": statistics.median(took_s for took_s, _ in runs),
                "median_ms": 1e3 * statistics.median(gaps[len(gaps) // 2] for _, gaps in runs),
                "p99_ms": 1e3 * statistics.median(gaps[len(gaps) * 99 // 100] for _, gaps in runs),
                "longest_ms": 1e3 * statistics.median(gaps[-1] for _, gaps in runs),
                "longest_of_each_run_ms": [1e3 * gaps[-1] for _, gaps in runs],
            }
            rows.append(row)
    print("| meanwhile | takes | median gap | 99th percentile | longest gap |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['beside']} | {row['took_s']:.1f} s | {row['median_ms']:.1f} ms | {row['p99_ms']:.0f} ms "
            f"| {row['longest_ms']:.0f} ms |"
        )
    print(f"\nMedians of {REPEATS} runs; raw: {keep('verify_loop', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
