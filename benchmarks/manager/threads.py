"""Goal of issue 44 (docs/benchmarks/manager.md#a-cold-adapter-beside-running-streams): who computes while one arrives.

Seconds of a processor's time of each thread while a 40 MB adapter arrives beside four streams, and while it is asked
again: `python -m benchmarks.manager.threads [--keep]`. Needs py-spy, for the threads' names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.manager import bed
from benchmarks.manager.arms import Arm, servers
from benchmarks.manager.client import load, stream
from benchmarks.manager.stall import COLD_PROMPT, COLD_TOKENS, STREAMS
from benchmarks.record import ROOT, keep

SIZE_MB, ARRIVALS, KINDS, WINDOW_S = 40, 12, ("cold", "resident"), 0.6
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processes_of(arm: Arm) -> list[psutil.Process]:
    server = psutil.Process(arm.server.process.pid)
    return [server, *server.children(recursive=True)]


def computed_s(arm: Arm) -> Counter[tuple[int, int]]:
    """Seconds of each thread so far, by process and thread."""
    found = Counter[tuple[int, int]]()
    for process in processes_of(arm):
        for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
            fields = stat.read_text().rpartition(")")[2].split()
            found[process.pid, int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return found


def names_of(arm: Arm) -> dict[tuple[int, int], str]:
    found = {}
    for process in processes_of(arm):
        command = [ROOT / ".venv/bin/py-spy", "dump", "--json", "--pid", str(process.pid)]
        dumped = subprocess.run(command, capture_output=True, text=True, check=False)
        for thread in json.loads(dumped.stdout or "[]"):
            found[process.pid, thread["os_thread_id"]] = f"{process.cmdline()[0]}: {thread['thread_name']}"
    return found


async def measured(arm: Arm, base: str, links: list[Path]) -> dict[str, dict[str, float]]:
    """Mean milliseconds of an arrival, by kind and thread."""
    running = [asyncio.create_task(stream(arm.port, base, 900, [])) for _ in range(STREAMS)]
    await asyncio.sleep(2)
    sums = {kind: Counter[tuple[int, int]]() for kind in KINDS}
    for directory in links:
        for kind in KINDS:
            before, began = computed_s(arm), time.monotonic()
            if kind == "cold":
                await load(arm.port, directory.name, str(directory))
            await stream(arm.port, directory.name, COLD_TOKENS, [], prompt=COLD_PROMPT)
            await asyncio.sleep(max(0.0, began + WINDOW_S - time.monotonic()))
            sums[kind].update(computed_s(arm) - before)
    names = names_of(arm)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {
        kind: {names.get(thread, "another"): round(s / len(links) * 1e3, 1) for thread, s in found.most_common(12)}
        for kind, found in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/stall_threads.json")
    options = parser.parse_args()
    base, rank = bed.base_model(), bed.RANKS[SIZE_MB]
    source = bed.adapter(base, rank)
    bed.warm_page_cache(source)
    arguments = ("--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "3")
    with (
        tempfile.TemporaryDirectory(dir=bed.CACHE) as home,
        servers(("ours+kernels",), base, Path(home), arguments) as (arm,),
    ):
        links = [bed.link(source, Path(home) / f"cold-{number}") for number in range(ARRIVALS)]
        found = asyncio.run(measured(arm, str(base), links))
    for kind, threads in found.items():
        print(f"\n{kind}: ms of a processor's time\n" + "\n".join(f"{ms:8.1f}  {name}" for name, ms in threads.items()))
    if options.keep:
        print(f"written to {keep('stall_threads', found)}")


if __name__ == "__main__":
    main()
