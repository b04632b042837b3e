"""Figure of docs/benchmarks/real.md#limits-of-a-step, for R66.

What a decoding step is limited by: bytes of the base and of adapters, by the memory bandwidth of the same cores.

The bandwidth is the best of products of a matrix with a vector, 1 GiB each, on the cores that vLLM's threads are bound
to, in a process of its own, before the server starts and after it has ended. Left out of the floor: the KV cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.manager.bed import size_bytes
from benchmarks.real.bed import NAME, OURS, STREAMS, Bed, Figure
from benchmarks.real.speed import SLOTS, decode_tokens_per_s

CASES = ((1, 0), (1, 1), (STREAMS, 0), (STREAMS, 1), (STREAMS, STREAMS))  # streams, adapters
REPEATED = 12


def measure(bed: Bed, rows: list[dict]) -> None:
    adapters = bed.adapters(STREAMS)
    base_bytes = size_bytes_of_model(bed.base)
    # bfloat16 in the files, float32 in the server's memory.
    adapter_bytes = [2 * size_bytes(directory) for directory in adapters]
    rows.append({"bandwidth_bytes_per_s": measured_bandwidth()})
    tokens = 8 if bed.is_quick else 32
    with bed.servers([OURS], *SLOTS) as (arm,):
        names = [directory.name for directory in adapters]
        for warmed in ([NAME], names):
            asyncio.run(decode_tokens_per_s(arm, warmed, 2))
        for number in bed.rounds():
            for streams, count in CASES if number % 2 == 0 else CASES[::-1]:
                speed = asyncio.run(decode_tokens_per_s(arm, names[:count] or [NAME], tokens, streams))
                row = {"round": number, "streams": streams, "adapters": count, "step_s": round(streams / speed, 6)}
                rows.append({**row, "base_bytes": base_bytes, "adapter_bytes": sum(adapter_bytes[:count])})
    rows.append({"bandwidth_bytes_per_s": measured_bandwidth()})


def size_bytes_of_model(base: Path) -> int:
    """All weights are read in a step: the embeddings are those of the head too."""
    return sum(file.stat().st_size for file in base.glob("*.safetensors"))


def figures(rows: list[dict]) -> list[Figure]:
    measured = [row["bandwidth_bytes_per_s"] for row in rows if "bandwidth_bytes_per_s" in row]
    if not measured:
        return []
    best = max(measured)
    spread = f"{min(measured) / 1e9:.1f} to {best / 1e9:.1f}, n={len(measured)}"
    found = [Figure("memory bandwidth of the worker's cores, GB/s", f"{best / 1e9:.1f}", spread)]
    steps = {
        case: [row for row in rows if (row.get("streams"), row.get("adapters")) == case]
        for case in CASES
    }  # fmt: skip
    for (streams, count), of_case in steps.items():
        if not of_case:
            continue
        floor_s = (of_case[0]["base_bytes"] + of_case[0]["adapter_bytes"]) / best
        each = [row["step_s"] / floor_s for row in of_case]
        step_ms = statistics.median(row["step_s"] for row in of_case) * 1e3
        label = f"{streams} stream{'s' * (streams > 1)}, {count or 'no'} adapter{'s' * (count != 1)}"
        figure = Figure.of_ratios(f"{label}: step by its floor ({step_ms:.1f} ms by {floor_s * 1e3:.1f} ms)", each)
        found.append(figure)
        base_s = {row["round"]: row["step_s"] for row in steps[streams, 0]}
        added_s = [row["step_s"] - base_s[row["round"]] for row in of_case if row["round"] in base_s]
        if count and added_s:
            floor_ms = of_case[0]["adapter_bytes"] / best * 1e3
            spread = f"{min(added_s) * 1e3:.1f} to {max(added_s) * 1e3:.1f}, n={len(added_s)}"
            value = f"{statistics.median(added_s) * 1e3:.1f} ms, floor {floor_ms:.2f} ms"
            found.append(Figure(f"{label}: what the adapters add to a step", value, spread))
    return found


def measured_bandwidth() -> float:
    """Bytes a second, of the cores but the last one, which the client and the API server have."""
    child = subprocess.run([sys.executable, "-m", __name__], stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(child.stdout))


def _bandwidth() -> float:
    import torch

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {max(cores)} or cores)
    torch.set_num_threads(max(1, len(cores) - 1))
    matrix, vector = torch.ones(1 << 14, 1 << 14), torch.ones(1 << 14)
    took_s = []
    for _ in range(REPEATED):
        began = time.perf_counter()
        matrix @ vector
        took_s.append(time.perf_counter() - began)
    return matrix.nbytes / min(took_s)


if __name__ == "__main__":
    print(json.dumps(_bandwidth()))
