"""Goal of no growth, and the figures of docs/benchmarks/manager.md#memory, for R17.

What adapters cost in resident memory, and whether it grows: vLLM's manager against ours, each in its own process.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.manager import bed
from benchmarks.manager.arms import NAMES, environment

HIDDEN, LAYERS = 1024, 8
ADAPTERS, RANK = 50, 16
CYCLES = 10_000
ARMS = ("vllm", "ours")


def measure(cycles: int = CYCLES) -> list[dict]:
    rows = []
    for what in ("held", "cycles"):
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.manager.memory", what, str(cycles)]
            env = {**os.environ, **environment(arm)}
            child = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
            rows.append({"arm": arm, "what": what, **json.loads(child.stdout.splitlines()[-1])})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict]) -> str:
    held = [row for row in rows if row["what"] == "held"]
    lines = ["| manager | adapters | their files | PSS grows by | of it anonymous |", "|---|---|---|---|---|"]
    for row in held:
        grown, anonymous = (
            (row["after"][name] - row["before"][name]) / 1e6 for name in ("pss_bytes", "anonymous_bytes")
        )
        lines.append(
            f"| {NAMES[row['arm']]} | {row['adapters']} | {row['file_bytes'] / 1e6:.0f} MB | {grown:.0f} MB "
            f"| {anonymous:.0f} MB |"
        )
    lines += [
        "",
        "| manager | load/unload cycles | RSS after 1,000 | RSS at the end | a cycle takes |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["what"] == "cycles":
            first, last = row["rss_bytes"][1], row["rss_bytes"][-1]
            lines.append(
                f"| {NAMES[row['arm']]} | {row['cycles']} | {first / 1e6:.1f} MB | {last / 1e6:.1f} MB "
                f"| {row['seconds'] / row['cycles'] * 1e3:.1f} ms |"
            )
    return "\n".join(lines)


def _resident() -> dict[str, int]:
    gc.collect()
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024
    return {"rss_bytes": found["Rss"], "pss_bytes": found["Pss"], "anonymous_bytes": found["Anonymous"]}


def _bring(manager: Any, request: Any) -> None:
    """As a request brings it: loaded and activated in the background where our scheduler has it so."""
    if not hasattr(manager, "begin_step"):
        manager.add_adapter(request)
        return
    from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Load, Loaded

    key = request.lora_int_id
    load = Load(AdapterSpec(key, request.lora_name, request.lora_path), key, job=2 * key)
    for command, report in ((load, Loaded), (Activate(key, slot=key % 2, job=2 * key + 1), Activated)):
        manager.begin_step([command])
        while not (reports := manager.reports(1.0)):
            pass
        if not isinstance(reports[0], report):
            raise RuntimeError(str(reports))


def _remove(manager: Any, number: int) -> bool:
    if not hasattr(manager, "begin_step"):
        return bool(manager.remove_adapter(number))
    from lora_plugins.scheduler.messages import Evict

    is_here = number in manager.list_adapters()
    manager.begin_step([Evict(number)])
    return is_here


def _held(manager: Any, home: Path, base: Path, request_of: Any) -> dict:
    source = bed.adapter(base, RANK)
    paths = []
    for number in range(ADAPTERS):  # own files: the page cache would share those of links
        directory = home / f"a{number}"
        shutil.copytree(source, directory)
        paths.append(directory)
    _bring(manager, request_of(1, paths[0]))
    _remove(manager, 1)
    before = _resident()
    for number, path in enumerate(paths, 2):
        _bring(manager, request_of(number, path))
    after = _resident()
    files = sum(bed.size_bytes(path) for path in paths)
    return {"adapters": len(manager.list_adapters()), "file_bytes": files, "before": before, "after": after}


def _cycles(manager: Any, home: Path, base: Path, request_of: Any, cycles: int) -> dict:
    source = bed.adapter(base, 8)
    paths = [bed.link(source, home / f"c{number}") for number in range(16)]
    rss = [_resident()["rss_bytes"]]
    started = time.perf_counter()
    for number in range(1, cycles + 1):
        _bring(manager, request_of(number, paths[number % len(paths)]))
        if not _remove(manager, number):
            raise RuntimeError(f"adapter {number} was not there")
        if number % 1000 == 0:
            rss.append(_resident()["rss_bytes"])
    return {"cycles": cycles, "rss_bytes": rss, "seconds": time.perf_counter() - started}


def _child(what: str, cycles: int) -> dict:
    from benchmarks.manager.engine import engine

    base = bed.base_model(HIDDEN, LAYERS) if what == "held" else bed.base_model(256, 4)
    capacity = ADAPTERS + 2
    with (
        tempfile.TemporaryDirectory(dir=bed.CACHE) as home,
        engine(base, max_lora_rank=RANK, max_loras=2, max_cpu_loras=capacity) as manager,
    ):
        from vllm.lora.request import LoRARequest

        def request_of(number: int, path: Path) -> Any:
            return LoRARequest(f"a{number}", number, str(path))

        if what == "held":
            return _held(manager, Path(home), base, request_of)
        return _cycles(manager, Path(home), base, request_of, cycles)


if __name__ == "__main__":
    output = os.dup(1)  # the engine prints too
    os.dup2(2, 1)
    result = _child(sys.argv[1], int(sys.argv[2]))
    os.write(output, (json.dumps(result) + "\n").encode())
