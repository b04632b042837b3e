"""Figure of docs/benchmarks/manager.md#under-overload-against-vllms-queue, for R64: `make bench-overload`.

First tokens of cold adapters on real servers that a flood of base requests fills: vLLM's manager beside ours.

    python -m benchmarks.manager.overload [--rounds N] [--keep]

Both servers are up at once, with our resolver and kernels; stretches alternate between them. 14 adapters share two
slots and four rows; 48 clients ask for the base model all the time, and every second a request asks for an adapter.
With `--keep` the rows go to benchmarks/results/overload.json.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from benchmarks.callers import first_token_s, port_of
from benchmarks.record import keep
from testbed.bed import Bed, prepare
from testbed.models import PROMPT, edit_config
from testbed.server import Server
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

ADAPTERS, SLOTS, ROWS, CLIENTS = 14, 2, 4, 48
STRETCH_S, TOKENS, EVERY_S = 60.0, 200, 1.0


async def stretch(server: Server, base: str) -> tuple[list[float], list[float]]:
    """Seconds to the first token, of adapters and of the flood."""
    port = port_of(server.url)
    ends, flood = time.monotonic() + STRETCH_S, list[float]()

    async def floods() -> None:
        while time.monotonic() < ends:
            flood.append(await first_token_s(port, base, TOKENS, PROMPT))

    clients = [asyncio.create_task(floods()) for _ in range(CLIENTS)]
    asked: list[asyncio.Task[float]] = []
    while time.monotonic() < ends:
        asked.append(asyncio.create_task(first_token_s(port, f"cold-{len(asked) % ADAPTERS}", TOKENS, PROMPT)))
        await asyncio.sleep(EVERY_S)
    cold = await asyncio.gather(*asked)
    await asyncio.gather(*clients)
    return cold, flood


def serve(stack: ExitStack, bed: Bed, home: Path, *plugins: str) -> Server:
    for number in range(ADAPTERS):
        target = home / "adapters" / f"cold-{number}"
        shutil.copytree(bed.adapters / ("sql", "chat")[number % 2], target)
        edit_config(target, revision=f"{number}")
    return stack.enter_context(
        lora_server(
            bed, home, "--max-loras", f"{SLOTS}", "--max-cpu-loras", "6", "--max-num-seqs", f"{ROWS}", plugins=plugins
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    bed, home = prepare(), Path(tempfile.mkdtemp())
    rows: list[dict[str, object]] = []
    print("| round | manager | adapters: p50 | p99 | longest | flood: p50 | requests |\n|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        arms = {
            "vLLM": serve(stack, bed, home / "vllm", RESOLVER, KERNELS),
            "ours": serve(stack, bed, home / "ours", RESOLVER, KERNELS, MANAGER),
        }
        for number in range(options.rounds):
            for arm, server in arms.items():
                cold, flood = asyncio.run(stretch(server, str(bed.base)))
                figures = {"p50_s": median(cold), "p99_s": quantiles(cold, n=100)[98], "longest_s": max(cold)}
                row = {"round": number, "arm": arm, **figures, "flood_p50_s": median(flood)}
                rows.append({**row, "adapters": cold, "requests": len(cold) + len(flood)})
                cells = [f"{value:.2f} s" for name, value in row.items() if name.endswith("_s")]
                print(f"| {number} | {arm} | {' | '.join(cells)} | {len(cold) + len(flood)} |", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    if options.keep:
        print(f"\nRaw: {keep('overload', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
