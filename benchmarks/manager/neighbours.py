"""What others feel of an adapter that cannot fit, of streams that fail, of beams and of aborts: vLLM against ours.

Two adapters are requested in a closed loop; meanwhile a third client makes trouble, or none does. The four kinds of
trouble and none alternate, in both servers, which are up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.manager import bed
from benchmarks.manager.arms import NAMES, Arm, servers
from benchmarks.manager.client import load, post, stream

HIDDEN, LAYERS, RANK = 1024, 8, 16
CLIENTS, NEW_TOKENS = 3, 8
TROUBLES = ("none", "cannot fit", "bad streams", "beams", "aborts")
_PAUSE_S = 0.25


def measure(arms: Sequence[str], *, stretches: int, stretch_s: float) -> list[dict]:
    base = bed.base_model(HIDDEN, LAYERS)
    source, wide = bed.adapter(base, RANK), bed.adapter(base, 64)
    arguments = ("--max-lora-rank", "32", "--max-loras", "3", "--max-cpu-loras", "4")
    rows = []
    with tempfile.TemporaryDirectory(dir=bed.CACHE) as home, servers(arms, base, Path(home), arguments) as running:
        adapters = [bed.link(source, Path(home) / f"a{number}") for number in range(3)]
        too_wide = bed.link(wide, Path(home) / "wide")  # of a rank that no slot holds
        for arm in running:
            for directory in adapters:
                asyncio.run(load(arm.port, directory.name, str(directory)))
        for stretch in range(-1, stretches):
            for trouble in TROUBLES:
                for turn in range(len(running)):
                    arm = running[(stretch + turn) % len(running)]
                    print(f"stretch {stretch + 1} of {stretches}, {trouble}, {arm.name}", flush=True)
                    took_s = asyncio.run(_stretch(arm, adapters, too_wide, trouble, stretch_s))
                    if stretch >= 0:
                        rows.append(
                            {
                                "arm": arm.name,
                                "trouble": trouble,
                                "stretch": stretch,
                                "took_ms": [round(one * 1e3, 1) for one in took_s],
                            }
                        )
    return rows


async def _stretch(arm: Arm, adapters: list[Path], too_wide: Path, trouble: str, stretch_s: float) -> list[float]:
    took_s: list[float] = []
    ends = time.perf_counter() + stretch_s

    async def client(number: int) -> None:
        while time.perf_counter() < ends:
            began = time.perf_counter()
            await stream(arm.port, adapters[number % 2].name, NEW_TOKENS, [], prompt=[40 + number])
            took_s.append(time.perf_counter() - began)

    making = asyncio.create_task(_make(trouble, arm, adapters[2].name, too_wide))
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    making.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await making
    return took_s


async def _make(trouble: str, arm: Arm, name: str, too_wide: Path) -> None:
    one: Callable[[], Awaitable[object]]
    if trouble == "none":
        return
    if trouble == "cannot fit":
        body = {"lora_name": "wide", "lora_path": str(too_wide)}
        one = lambda: post(arm.port, "/v1/load_lora_adapter", body)  # noqa: E731
    elif trouble == "bad streams":
        body = {"model": name, "prompt": [40] * 4000, "max_tokens": 1, "stream": True}
        one = lambda: post(arm.port, "/v1/completions", body)  # noqa: E731
    elif trouble == "beams":
        body = {"model": name, "prompt": [40], "max_tokens": 8, "use_beam_search": True, "n": 2, "temperature": 0}
        one = lambda: post(arm.port, "/v1/completions", body)  # noqa: E731
    else:
        body = {"model": name, "prompt": [40], "max_tokens": 200, "ignore_eos": True}
        one = lambda: _abort(arm.port, body)  # noqa: E731
    while True:
        await one()
        await asyncio.sleep(_PAUSE_S)


async def _abort(port: int, body: dict) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await post(port, "/v1/completions", body)


def table(rows: list[dict]) -> str:
    lines = ["| meanwhile | manager | requests | median | p99 | p99 against none |", "|---|---|---|---|---|---|"]
    quiet: dict[str, float] = {}
    for trouble in TROUBLES:
        for arm in NAMES:
            took = [one for row in rows if (row["arm"], row["trouble"]) == (arm, trouble) for one in row["took_ms"]]
            if not took:
                continue
            p99 = float(np.percentile(took, 99))
            quiet.setdefault(arm, p99)
            lines.append(
                f"| {trouble} | {NAMES[arm]} | {len(took)} | {np.median(took):.0f} ms | {p99:.0f} ms "
                f"| {p99 / quiet[arm]:.2f}× |"
            )
    return "\n".join(lines)
