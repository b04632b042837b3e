"""Goals of R30 on a real model (docs/benchmarks/real.md#decoding-16-streams and #rank-of-the-slots).

Tokens/s with 1, 4 and 16 adapters in a batch of 16 requests against the base model, on one server, in turn.

Decode: 16 streams; a stream's speed is that from its first token to its last one. Prefill: 16 prompts of 512 tokens,
answered with one token each, no prefix cache. A ratio is that of one round, whose turns follow each other.
Ranks: decoding by `--max-lora-rank`, with our CPU kernels, which compute each adapter at its own rank, and with vLLM's,
which compute it at the slots'. With vLLM's kernels and large slots an answer takes long, so its streams are shorter.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from benchmarks.manager.arms import Arm
from benchmarks.manager.client import post, stream
from benchmarks.processors import bfloat16_instructions
from benchmarks.real.bed import MAX_RANK, NAME, OURS, SMALL, STOCK, STREAMS, Bed, Figure
from benchmarks.real.many import parallel
from lora_plugins.kernels.processor import this_processor

COUNTS = (0, 1, 4, 16)  # of adapters; none for the base model
GOALS = {("float32", 1): 0.97, ("float32", 16): 0.93, ("bfloat16", 1): 0.95, ("bfloat16", 16): 0.90}
NEW_TOKENS, PROMPT_TOKENS = 32, 512
SLOT_RANKS, RANK_COUNTS = (16, 256), (0, 1, 4)
RANK_TOKENS, RANK_TOKENS_OF_STOCK = 32, {16: 16, 256: 3}
RANK_ROUNDS = {OURS: 4, STOCK: 2}
SLOTS = ("--max-loras", "16", "--max-cpu-loras", "16", "--max-lora-rank", str(MAX_RANK))


def dealt(names: Sequence[str], requests: int = STREAMS) -> list[str]:
    """A name for each request, in turn."""
    return [names[number % len(names)] for number in range(requests)]


def prompt(random_: random.Random, tokens: int) -> list[int]:
    return [random_.randrange(100, 49_000) for _ in range(tokens)]


async def decode_tokens_per_s(arm: Arm, names: Sequence[str], tokens: int, streams: int = STREAMS) -> float:
    """Of all streams together."""
    at: list[list[float]] = [[] for _ in range(streams)]
    asked = (
        stream(arm.port, name, tokens, times, prompt(random.Random(number), 8))
        for number, (name, times) in enumerate(zip(dealt(names, streams), at, strict=True))
    )
    await asyncio.gather(*asked)
    if not all(at):
        raise RuntimeError(f"a stream ended without a token: {arm.server.log()[-2000:]}")
    return sum((tokens - 1) / (times[-1] - times[0]) for times in at)


async def prefill_tokens_per_s(arm: Arm, names: Sequence[str], tokens: int, streams: int = STREAMS) -> float:
    bodies = [
        {"model": name, "prompt": prompt(random.Random(number), tokens), "max_tokens": 1, "temperature": 0}
        for number, name in enumerate(dealt(names, streams))
    ]
    began = time.perf_counter()
    statuses = await asyncio.gather(*(post(arm.port, "/v1/completions", body) for body in bodies))
    if set(statuses) != {200}:
        raise RuntimeError(f"{statuses}: {arm.server.log()[-2000:]}")
    return streams * tokens / (time.perf_counter() - began)


Turn = Callable[[Arm, Sequence[str], int], Coroutine[Any, Any, float]]


def _measure(bed: Bed, rows: list[dict], turn: Turn, tokens: int, arguments: Sequence[str]) -> None:
    names = [directory.name for directory in bed.adapters(max(COUNTS))]
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16" and bfloat16_instructions(this_processor()) is None:
            rows.append({"dtype": dtype, "left_out": "no AVX-512 BF16 and no AMX here"})
            continue
        try:
            with bed.servers([OURS], "--dtype", dtype, *SLOTS, *arguments) as (arm,):
                _rounds(bed, rows, arm, names, dtype, turn, tokens)
        except (RuntimeError, OSError) as error:
            if dtype == "float32":
                raise
            rows.append({"dtype": dtype, "left_out": f"the server ended: {str(error)[-1000:]}"})


def _rounds(bed: Bed, rows: list[dict], arm: Arm, names: list[str], dtype: str, turn: Turn, tokens: int) -> None:
    of_count = {count: names[:count] or [NAME] for count in COUNTS}
    asyncio.run(decode_tokens_per_s(arm, [NAME], 2))
    asyncio.run(decode_tokens_per_s(arm, names, 2))  # each adapter's first use
    for number in bed.rounds():
        for count in COUNTS if number % 2 == 0 else COUNTS[::-1]:
            speed = asyncio.run(turn(arm, of_count[count], tokens))
            rows.append({"dtype": dtype, "round": number, "adapters": count, "tokens_per_s": round(speed, 2)})


def decode(bed: Bed, rows: list[dict]) -> None:
    _measure(bed, rows, decode_tokens_per_s, 8 if bed.is_quick else NEW_TOKENS, ())


def prefill(bed: Bed, rows: list[dict]) -> None:
    tokens = 64 if bed.is_quick else PROMPT_TOKENS
    _measure(bed, rows, prefill_tokens_per_s, tokens, ("--max-num-batched-tokens", "2048"))


def decode_figures(rows: list[dict]) -> list[Figure]:
    return _figures(rows, GOALS)


def prefill_figures(rows: list[dict]) -> list[Figure]:
    return _figures(rows, {})


def _figures(rows: list[dict], goals: dict[tuple[str, int], float]) -> list[Figure]:
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        speeds = {(row["round"], row["adapters"]): row["tokens_per_s"] for row in of_dtype if "round" in row}
        for count in COUNTS:
            of_count = {number: speed for (number, of), speed in speeds.items() if of == count}
            if not of_count:
                continue
            if count == 0:
                each = of_count.values()
                spread = f"{min(each):.1f} to {max(each):.1f}, n={len(each)}"
                found.append(Figure(f"{dtype}, base, tokens/s", f"{statistics.median(each):.1f}", spread))
                continue
            ratios = [speed / speeds[number, 0] for number, speed in of_count.items() if (number, 0) in speeds]
            if ratios:
                label = f"{dtype}, {count} adapter{'s' * (count > 1)}, share of the base's"
                found.append(Figure.of_ratios(label, ratios, at_least=goals.get((dtype, count))))
        found += [Figure(dtype, "left out", row["left_out"]) for row in of_dtype if "left_out" in row]
    return found


def ranks(bed: Bed, rows: list[dict]) -> None:
    names = [directory.name for directory in bed.adapters(max(RANK_COUNTS), SMALL)]
    for rank in SLOT_RANKS[:1] if bed.is_quick else SLOT_RANKS:
        slots = ("--max-loras", "4", "--max-cpu-loras", "4", "--max-lora-rank", str(rank))
        with bed.servers((OURS, STOCK), *slots) as running:
            for arm in running:
                asyncio.run(parallel(arm, [NAME, *names]))  # each adapter's first use
            for number in range(1 if bed.is_quick else max(RANK_ROUNDS.values())):
                for arm in running:
                    if number < RANK_ROUNDS[arm.name]:
                        tokens = RANK_TOKENS if arm.name == OURS else RANK_TOKENS_OF_STOCK[rank]
                        for count in RANK_COUNTS if number % 2 == 0 else RANK_COUNTS[::-1]:
                            speed = asyncio.run(decode_tokens_per_s(arm, names[:count] or [NAME], tokens))
                            rows.append({"arm": arm.name, "slot_rank": rank, "round": number, "adapters": count,
                                         "tokens_per_s": round(speed, 2)})  # fmt: skip


def rank_figures(rows: list[dict]) -> list[Figure]:
    found = []
    for rank in SLOT_RANKS:
        for arm in (OURS, STOCK):
            of_case = [row for row in rows if (row["arm"], row["slot_rank"]) == (arm, rank)]
            base = {row["round"]: row["tokens_per_s"] for row in of_case if row["adapters"] == 0}
            for count in RANK_COUNTS[1:]:
                ratios = [row["tokens_per_s"] / base[row["round"]] for row in of_case
                          if row["adapters"] == count and row["round"] in base]  # fmt: skip
                if ratios:
                    label = f"--max-lora-rank {rank}, {count} adapter{'s' * (count > 1)}, {arm}: share of the base's"
                    found.append(Figure.of_ratios(label, ratios))
    return found
