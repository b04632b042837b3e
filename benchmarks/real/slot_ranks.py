"""Figure of docs/benchmarks/real.md#rank-of-the-slots, for R30 and R66.

Tokens/s of 16 streams with adapters against the base, by `--max-lora-rank`, with our CPU kernels and with vLLM's.

vLLM's kernels compute each adapter at the rank of the slots, ours at the adapter's own. Each share is that of a server
and a round: its adapters against its own base model. With vLLM's kernels and large slots an answer takes long, so its
streams are shorter.
"""

from __future__ import annotations

import asyncio

from benchmarks.real.bed import NAME, OURS, SMALL, STOCK, STREAMS, Bed, Figure
from benchmarks.real.many import parallel
from benchmarks.real.speed import decode_tokens_per_s

SLOT_RANKS = (16, 256)
COUNTS = (0, 1, 4)
TOKENS, TOKENS_OF_STOCK = 32, {16: 16, 256: 3}
ROUNDS = {OURS: 4, STOCK: 2}


def measure(bed: Bed, rows: list[dict]) -> None:
    names = [directory.name for directory in bed.adapters(max(COUNTS), SMALL)]
    for rank in SLOT_RANKS[:1] if bed.is_quick else SLOT_RANKS:
        slots = ("--max-loras", "4", "--max-cpu-loras", "4", "--max-lora-rank", str(rank))
        with bed.servers((OURS, STOCK), *slots) as running:
            for arm in running:
                asyncio.run(parallel(arm, [NAME, *names]))  # each adapter's first use
            for number in range(1 if bed.is_quick else max(ROUNDS.values())):
                for arm in running:
                    if number < ROUNDS[arm.name]:
                        tokens = TOKENS if arm.name == OURS else TOKENS_OF_STOCK[rank]
                        for count in COUNTS if number % 2 == 0 else COUNTS[::-1]:
                            asked = names[:count] or [NAME]
                            speed = asyncio.run(decode_tokens_per_s(arm, asked, tokens, STREAMS))
                            rows.append({"arm": arm.name, "slot_rank": rank, "round": number, "adapters": count,
                                         "tokens_per_s": round(speed, 2)})  # fmt: skip


def figures(rows: list[dict]) -> list[Figure]:
    found = []
    for rank in SLOT_RANKS:
        for arm in (OURS, STOCK):
            of_case = [row for row in rows if (row["arm"], row["slot_rank"]) == (arm, rank)]
            base = {row["round"]: row["tokens_per_s"] for row in of_case if row["adapters"] == 0}
            for count in COUNTS[1:]:
                ratios = [row["tokens_per_s"] / base[row["round"]] for row in of_case
                          if row["adapters"] == count and row["round"] in base]  # fmt: skip
                if ratios:
                    label = f"--max-lora-rank {rank}, {count} adapter{'s' * (count > 1)}, {arm}: share of the base's"
                    found.append(Figure.of_ratios(label, ratios))
    return found
