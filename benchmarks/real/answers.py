"""Goals of R34, R54 and R66 on a real model (docs/benchmarks/real.md#swaps-under-load and #served-as-trained).

Answers against PEFT's: of a name that gets a new version again and again, and of each trained adapter.

`swaps`: four trained adapters are published in turn as versions of one name, by renaming, and the server is told to
look again. An answer names its version by a digest: its tokens must be PEFT's for that version, and no answer that
began after a swap was acknowledged may be of an earlier version. Prefixes are cached, as all requests have one prompt.
Stretches with and without swaps alternate, so that their answers/s can be compared.
`compare`: served logarithms of probabilities against PEFT's, by `lora-plugins compare`, in multiples of the noise
floor: how far the served base model is from PEFT's. The same adapters on vLLM without us.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.callers import Answer, Caller
from benchmarks.real.bed import MAX_RANK, NAME, OURS, SHIPPED, SMALL, STOCK, TRAINED, Bed, Figure, dtypes
from benchmarks.real.many import parallel
from examples.hot_swap import publish
from lora_plugins.cli.at_fault import ByPeft
from lora_plugins.cli.compare import OK, PROMPTS
from testbed.client import PLAIN_HTTP
from testbed.models import PROMPT, edit_config
from testbed.reference import Reference

CALLERS, TOKENS, SWAPS, SWAPS_OF_A_ROUND, BETWEEN_S = 8, 12, 100, 10, 0.5
SWAPPED = "house"
WRONG = ("not answered", "of another version", "begun after a swap, and old")
SLOTS = ("--max-lora-rank", str(MAX_RANK), "--max-loras", "4", "--max-cpu-loras", "8")
COMPARED_IF_QUICK = 2  # adapters


@dataclass(frozen=True)
class Version:
    """What was published, and when the server had acknowledged it."""

    digest: str
    source: str
    at: float


def swaps(bed: Bed, rows: list[dict]) -> None:
    sources = {directory.name: directory for directory in bed.adapters(len(SMALL), SMALL)}
    of_a_round = 2 if bed.is_quick else SWAPS_OF_A_ROUND
    versions: list[Version] = []
    answers: list[Answer] = []
    turn = itertools.cycle(sources)
    with bed.servers([OURS], *SLOTS, "--enable-prefix-caching") as (arm,):

        def swap() -> float:
            source = next(turn)
            fresh = bed.home / "fresh"
            shutil.copytree(sources[source], fresh)
            edit_config(fresh, revision=str(len(versions)))  # a digest of its own
            publish(fresh, bed.root / SWAPPED)
            shutil.rmtree(fresh)
            began = time.monotonic()
            if not versions:
                asyncio.run(parallel(arm, [SWAPPED]))  # the first request has the server find it
            method = "POST" if versions else "GET"
            url = f"{arm.server.url}/v1/loras/{SWAPPED}{'/refresh' if versions else ''}"
            said = httpx.request(method, url, timeout=60, verify=PLAIN_HTTP).raise_for_status().json()
            ended = time.monotonic()
            versions.append(Version(said["digest"], source, ended))
            return ended - began

        swap()
        for number in bed.rounds(SWAPS // of_a_round):
            for count in (of_a_round, 0) if number % 2 == 0 else (0, of_a_round):
                with Caller(arm.server.url, [SWAPPED], TOKENS, CALLERS) as caller:
                    took_s = []
                    for _ in range(of_a_round):
                        time.sleep(BETWEEN_S)
                        took_s += [swap()] if count else []
                    time.sleep(BETWEEN_S)
                rows.append({"round": number, "swaps": count, "swap_s": took_s, "answers_per_s": caller.per_s})
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


def swap_figures(rows: list[dict]) -> list[Figure]:
    stretches = [row for row in rows if "round" in row]
    took_ms = [second * 1e3 for row in stretches for second in row["swap_s"]]
    counted = [row for row in rows if "answers" in row]
    found = [
        Figure(f"answers {what}", str(row[what]), f"of {row['answers']}, {len(took_ms)} swaps", "0", row[what] == 0)
        for row in counted
        for what in WRONG
    ]
    if took_ms:
        found.append(Figure.of_each("a swap: look again, verify, load, serve", took_ms, ".0f", " ms"))
    speeds = {(row["round"], bool(row["swaps"])): row["answers_per_s"] for row in stretches}
    ratios = [speed / speeds[number, False] for (number, is_swapped), speed in speeds.items()
              if is_swapped and (number, False) in speeds]  # fmt: skip
    if ratios:
        found.append(Figure.of_ratios("answers/s with two swaps a second, of without", ratios))
    return found


def compare(bed: Bed, rows: list[dict]) -> None:
    names = TRAINED[:COMPARED_IF_QUICK] if bed.is_quick else TRAINED
    bed.adapters(len(TRAINED))
    trained = {name: _trained(bed, name) for name in names}
    for dtype in dtypes(rows):
        with bed.servers([OURS, STOCK], "--dtype", dtype, *SLOTS) as arms:
            for arm in arms:
                for name in names:
                    found = _compared(arm.port, name, trained[name])
                    rows.append({"dtype": dtype, "arm": arm.name, "adapter": name, **found})


def _trained(bed: Bed, name: str) -> Path:
    """What PEFT computes, as a trainer's file: PEFT's process ends before servers start."""
    path = bed.home / f"{name}.jsonl"
    model = ByPeft(SHIPPED / name, str(bed.base))
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in map(model.trained, PROMPTS)))
    return path


def _compared(port: int, name: str, trained: Path) -> dict:
    command = [str(Path(sys.executable).with_name("lora-plugins")), "compare", name, "--json"]
    command += ["--trainer", str(trained), "--url", f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    try:
        said = json.loads(done.stdout)
        prompts = said["prompts"]
        return {
            "verdict": said["verdict"],
            "floor": said["floor"],
            "largest": max(one["largest"] for one in prompts),
            "mean": max(one["mean"] for one in prompts),
        }
    except (ValueError, KeyError):
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}") from None


def compare_figures(rows: list[dict]) -> list[Figure]:
    found = [Figure(f"{row['dtype']}, {NAME}", "left out", row["left_out"]) for row in rows if "left_out" in row]
    for dtype, arm in dict.fromkeys((row["dtype"], row["arm"]) for row in rows if "arm" in row):
        some = [row for row in rows if row.get("arm") == arm and row["dtype"] == dtype]
        right, floor = sum(row["verdict"] == OK for row in some), max(row["floor"]["largest"] for row in some)
        spread, goal = f"{right} of {len(some)} as trained, floor {floor:.1e}", "≤ 5, all" if arm == OURS else ""
        value = f"{max(row['largest'] for row in some):.2f}"
        is_met = right == len(some) if goal else None
        found.append(Figure(f"{dtype}, {arm}: largest distance, in floors", value, spread, goal, is_met))
    return found
