"""Goal of R34 on a real model (docs/benchmarks/real.md#swaps-under-load).

A name gets a new version again and again while clients ask for it; each answer is compared with PEFT's.

Four trained adapters are published in turn as versions of one name, by renaming, and the server is told to look again.
An answer names its version by a digest: its tokens must be PEFT's for that version, and no answer that began after a
swap was acknowledged may be of an earlier version. Prefixes are cached, as all requests have one prompt. Stretches with
and without swaps alternate, so that their answers/s can be compared.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.callers import Answer, Caller
from benchmarks.real.bed import MAX_RANK, OURS, SMALL, Bed, Figure
from benchmarks.real.many import parallel
from examples.hot_swap import publish
from testbed.client import PLAIN_HTTP
from testbed.models import PROMPT, edit_config
from testbed.reference import Reference

CALLERS, TOKENS, SWAPS, SWAPS_OF_A_ROUND, BETWEEN_S = 8, 12, 100, 10, 0.5
NAME = "house"
WRONG = ("not answered", "of another version", "begun after a swap, and old")


@dataclass(frozen=True)
class Version:
    """What was published, and when the server had acknowledged it."""

    digest: str
    source: str
    at: float


def measure(bed: Bed, rows: list[dict]) -> None:
    sources = {directory.name: directory for directory in bed.adapters(len(SMALL), SMALL)}
    of_a_round = 2 if bed.is_quick else SWAPS_OF_A_ROUND
    slots = ("--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", str(MAX_RANK))
    versions: list[Version] = []
    answers: list[Answer] = []
    turn = itertools.cycle(sources)
    with bed.servers([OURS], *slots, "--enable-prefix-caching") as (arm,):

        def swap() -> float:
            source = next(turn)
            fresh = bed.home / "fresh"
            shutil.copytree(sources[source], fresh)
            edit_config(fresh, revision=str(len(versions)))  # a digest of its own
            publish(fresh, bed.root / NAME)
            shutil.rmtree(fresh)
            began = time.monotonic()
            if not versions:
                asyncio.run(parallel(arm, [NAME]))  # the first request has the server find it
            method = "POST" if versions else "GET"
            url = f"{arm.server.url}/v1/loras/{NAME}{'/refresh' if versions else ''}"
            said = httpx.request(method, url, timeout=60, verify=PLAIN_HTTP).raise_for_status().json()
            ended = time.monotonic()
            versions.append(Version(said["digest"], source, ended))
            return ended - began

        swap()
        for number in bed.rounds(SWAPS // of_a_round):
            for swaps in (of_a_round, 0) if number % 2 == 0 else (0, of_a_round):
                with Caller(arm.server.url, [NAME], TOKENS, CALLERS) as caller:
                    took_s = []
                    for _ in range(of_a_round):
                        time.sleep(BETWEEN_S)
                        took_s += [swap()] if swaps else []
                    time.sleep(BETWEEN_S)
                rows.append({"round": number, "swaps": swaps, "swap_s": took_s, "answers_per_s": caller.per_s})
                answers += caller.answers
    peft = Reference(bed.base)
    prompt = peft.prompt_ids(PROMPT)
    found = judged(answers, versions, lambda source, ids: not peft.misses(sources[source], prompt, ids))
    rows.append({"answers": len(answers), **found})


def judged(
    answers: Sequence[Answer], versions: Sequence[Version], is_right: Callable[[str, Sequence[int]], bool]
) -> Counter[str]:
    """Count answers by what they are; `is_right` is asked once for each adapter and each answer of its own."""
    number = {version.digest: at for at, version in enumerate(versions)}
    known: dict[tuple[str, tuple[int, ...]], bool] = {}
    found = Counter[str](dict.fromkeys(("right", *WRONG), 0))
    for answer in answers:
        at = number.get(answer.digest)
        if answer.status != 200:
            found["not answered"] += 1
            continue
        case = ("" if at is None else versions[at].source, tuple(answer.ids))
        if case not in known:
            known[case] = at is not None and is_right(*case)
        found["right" if known[case] else "of another version"] += 1
        if at is not None and at + 1 < len(versions) and answer.began_at > versions[at + 1].at:
            found["begun after a swap, and old"] += 1
    return found


def figures(rows: list[dict]) -> list[Figure]:
    stretches = [row for row in rows if "round" in row]
    took_ms = [second * 1e3 for row in stretches for second in row["swap_s"]]
    counted = [row for row in rows if "answers" in row]
    found = [
        Figure(f"answers {what}", str(row[what]), f"of {row['answers']}, {len(took_ms)} swaps", "0", row[what] == 0)
        for row in counted
        for what in WRONG
    ]
    if took_ms:
        spread = f"{min(took_ms):.0f} to {max(took_ms):.0f} ms, n={len(took_ms)}"
        found.append(Figure("a swap: look again, verify, load, serve", f"{statistics.median(took_ms):.0f} ms", spread))
    speeds = {(row["round"], bool(row["swaps"])): row["answers_per_s"] for row in stretches}
    ratios = [speed / speeds[number, False] for (number, swaps), speed in speeds.items()
              if swaps and (number, False) in speeds]  # fmt: skip
    if ratios:
        found.append(Figure.of_ratios("answers/s with two swaps a second, of without", ratios))
    return found
