"""Goals of R30 on a real model (docs/benchmarks/real.md#decoding-16-streams).

Tokens/s with 1, 4 and 16 adapters in a batch of 16 requests against the base model, on one server, in turn; and of the
base model's requests against a server with vLLM's own resolver, manager and kernels.

A stream's speed is that from its first token to its last one. A ratio is that of one round, whose turns follow each
other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from benchmarks.callers import stream
from benchmarks.manager.bed import Arm
from benchmarks.real.bed import MAX_RANK, NAME, OURS, STOCK, STREAMS, Bed, Figure, dtypes

COUNTS = (0, 1, 4, 16)  # of adapters; none for the base model
GOALS = {("float32", 1): 0.97, ("float32", 16): 0.93, ("bfloat16", 1): 0.95, ("bfloat16", 16): 0.90}
NEW_TOKENS = 32
SLOTS = ("--max-loras", "16", "--max-cpu-loras", "16", "--max-lora-rank", str(MAX_RANK))


async def tokens_per_s(arm: Arm, names: Sequence[str], tokens: int) -> float:
    """Of all streams together, which take the names in turn."""
    at: list[list[float]] = [[] for _ in range(STREAMS)]
    asked = []
    for number, times in enumerate(at):
        prompt = random.Random(number).choices(range(100, 49_000), k=8)
        asked.append(stream(arm.port, names[number % len(names)], tokens, times, prompt))
    await asyncio.gather(*asked)
    if not all(at):
        raise RuntimeError(f"a stream ended without a token: {arm.server.log()[-2000:]}")
    return sum((tokens - 1) / (times[-1] - times[0]) for times in at)


def decode(bed: Bed, rows: list[dict]) -> None:
    names = [directory.name for directory in bed.adapters(max(COUNTS))]
    for dtype in dtypes(rows):
        try:
            with bed.servers([OURS, STOCK], "--dtype", dtype, *SLOTS) as (ours, stock):
                _rounds(bed, rows, ours, stock, names, dtype)
        except (RuntimeError, OSError) as error:
            if dtype == "float32":
                raise
            rows.append({"dtype": dtype, "left_out": f"the server ended: {str(error)[-1000:]}"})


def _rounds(bed: Bed, rows: list[dict], ours: Arm, stock: Arm, names: list[str], dtype: str) -> None:
    asyncio.run(tokens_per_s(stock, [NAME], 2))
    asyncio.run(tokens_per_s(ours, [NAME], 2))
    asyncio.run(tokens_per_s(ours, names, 2))  # each adapter's first use
    turns = [(stock, 0), *((ours, count) for count in COUNTS)]
    for number in bed.rounds():
        for arm, count in turns if number % 2 == 0 else turns[::-1]:
            speed = asyncio.run(tokens_per_s(arm, names[:count] or [NAME], 8 if bed.is_quick else NEW_TOKENS))
            row = {"dtype": dtype, "round": number, "arm": arm.name, "adapters": count}
            rows.append({**row, "tokens_per_s": round(speed, 2)})


def decode_figures(rows: list[dict]) -> list[Figure]:
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        measured = [row for row in of_dtype if "round" in row]
        speeds = {(row["round"], row["arm"], row["adapters"]): row["tokens_per_s"] for row in measured}
        base = {number: speed for (number, arm, count), speed in speeds.items() if arm == OURS and count == 0}
        if base:
            found.append(Figure.of_each(f"{dtype}, base, tokens/s", [*base.values()], ".1f"))
        for arm, count in dict.fromkeys((arm, count) for _, arm, count in speeds if (arm, count) != (OURS, 0)):
            of_turn = {number: speed for (number, *turn), speed in speeds.items() if turn == [arm, count]}
            if arm == STOCK:
                ratios = [base[number] / speed for number, speed in of_turn.items()]
                found.append(Figure.of_ratios(f"{dtype}, base, share of the base's in stock vLLM", ratios))
            else:
                ratios = [speed / base[number] for number, speed in of_turn.items()]
                label = f"{dtype}, {count} adapter{'s' * (count > 1)}, share of the base's"
                found.append(Figure.of_ratios(label, ratios, at_least=GOALS.get((dtype, count))))
        found += [Figure(dtype, "left out", row["left_out"]) for row in of_dtype if "left_out" in row]
    return found
