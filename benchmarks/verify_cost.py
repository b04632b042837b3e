"""What verification costs: seconds per adapter size and dtype, with and without the pass over the weights.

Each size is measured interleaved with a plain read of the same file (page cache warm), so the ratio holds on a noisy
machine. Adapters are read as a server does it: by a child process that runs already. Prints a
Markdown table and keeps the raw figures in benchmarks/results/verify_cost.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.record import keep
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.verification.children import children

REPEATS = 7
SIZES_MB = (20, 200, 1000)
RANK, HIDDEN = 64, 4096


def write_adapter(directory: Path, size_mb: int, dtype: str, item_bytes: int) -> None:
    """A Llama-8B-like adapter of about this size, written without torch."""
    pair_bytes = 2 * RANK * HIDDEN * item_bytes
    modules = max(1, round(size_mb * 1e6 / pair_bytes))
    header, offset = {}, 0
    for index in range(modules):
        module = f"base_model.model.model.layers.{index // 4}.self_attn.{'qkvo'[index % 4]}_proj"
        for side, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
            size = RANK * HIDDEN * item_bytes
            header[f"{module}.lora_{side}.weight"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + size],
            }
            offset += size
    raw = json.dumps(header).encode()
    piece = np.random.default_rng(0).integers(0, 0x3F, RANK * HIDDEN * item_bytes, dtype=np.uint8).tobytes()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _ in range(2 * modules):
            file.write(piece)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": [f"{x}_proj" for x in "qkvo"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def plain_read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def main() -> int:
    rows = []
    for dtype, item_bytes in (("BF16", 2), ("F32", 4)):
        for size_mb in SIZES_MB:
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                write_adapter(directory, size_mb, dtype, item_bytes)
                weights = directory / "adapter_model.safetensors"
                whole = Settings(base_match=BaseMatch.OFF)
                header_only = Settings(base_match=BaseMatch.OFF, check_finite=False)
                jobs: dict[str, Callable[[], object]] = {
                    "read_s": lambda weights=weights: plain_read(weights),
                    "header_s": lambda d=directory, s=header_only: children().read(d, s).result(),
                    "verify_s": lambda d=directory, s=whole: children().read(d, s).result(),
                }
                times: dict[str, list[float]] = {job: [] for job in jobs}
                for _ in range(REPEATS):
                    for job, work in jobs.items():
                        times[job].append(timed(work))
                medians = {job: statistics.median(values) for job, values in times.items()}
                rows.append({"dtype": dtype, "bytes": weights.stat().st_size, **medians, "all": times})
    print("| weights | plain read | without the pass | whole verification | GB/s | verification / read |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['bytes'] / 1e6:.0f} MB {row['dtype']} | {row['read_s'] * 1e3:.0f} ms "
            f"| {row['header_s'] * 1e3:.1f} ms | {row['verify_s'] * 1e3:.0f} ms "
            f"| {row['bytes'] / row['verify_s'] / 1e9:.1f} | {row['verify_s'] / row['read_s']:.1f} |"
        )
    print(f"\nMedians of {REPEATS}, page cache warm; raw: {keep('verify_cost', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
