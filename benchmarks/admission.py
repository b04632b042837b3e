"""How the planner admits requests, against vLLM's own order, in virtual time; and what a step of planning costs.

First both orders say again what was measured on real servers, then they speak of what no machine here can hold. Prints
Markdown and keeps the raw figures in benchmarks/results/admission.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from statistics import mean, quantiles
from typing import Any

from benchmarks.admission_fit import FITTED, HEAD, compare, fit, measured, simulated
from benchmarks.admission_model import SEED, Case, Ours, Outcome, Timings, Vllm, busy, drive
from benchmarks.manager.admission import PAIRS
from benchmarks.manager.scenarios import ALONE, DRAWN, FLOOD, SERVINGS, Traffic, traffic_of
from benchmarks.record import keep
from tests.scheduler.simulated import spec

CELLS = (
    "requests/s | mean first token, s | most asked, whole: p50 | p99 | least asked, first: p99 | longest | host hits"
)
ZIPF = Traffic("Zipf", 12, 1.0)
# Assumed, not measured: a GPU with an 8 B model, under asynchronous scheduling, as in the trial of policies.
GPU = Timings(0.009, 0.00003, 0.0003, 0.0015, copy_s=0.004, load_s=0.08, slowed=0.03, think_s=0.004, is_async=True)


def many_adapters(seconds: float) -> Iterator[Case]:
    """100 of 1,000 in host memory: with 80 % of what vLLM's order answers to twelve clients, twice it, 200 clients."""
    common = Case("", 1000, 8, 100, 32, ZIPF, Timings(), is_pointed=False, seconds=seconds)
    for name, share in (("1,000 adapters, 80 % busy", 0.8), ("1,000 adapters, overload", 2.0)):
        yield replace(busy(common, share), name=name)
    yield replace(common, name="1,000 adapters, 200 clients", traffic=replace(ZIPF, clients=200))


def with_fitted_timings(seconds: float) -> Iterator[Case]:
    """What was not measured: the flood elsewhere, and long answers."""
    for serving in SERVINGS:
        for slots in PAIRS:
            if timings := FITTED.get((serving.name, slots)):
                for traffic in () if FLOOD in traffic_of(serving) else (ALONE, FLOOD):
                    yield simulated(serving, slots, traffic, timings, seconds)
                for traffic in (one for one in DRAWN if one.clients == 12):
                    case = simulated(replace(serving, tokens=128), slots, traffic, timings, seconds)
                    yield replace(case, name=f"{case.name}, answers of 128 tokens")


def on_a_gpu(seconds: float) -> Iterator[Case]:
    for adapters, slots in ((16, 4), (40, 3)):
        for traffic in (*DRAWN, ALONE, FLOOD):
            name = f"{adapters}/{slots}, GPU as assumed, {traffic.name}"
            yield Case(name, adapters, slots, adapters + 2, 64, traffic, GPU, is_pointed=False, seconds=seconds)


def planning_us(adapters: int, *, is_pointed: bool, held: int = 1000, steps: int = 4000) -> tuple[float, float, float]:
    """Mean, median and 99th percentile of what the planner takes of a step's time: notifications and plan."""
    engine = Ours(Case("", adapters, 8, 100, 32, ZIPF, Timings(), is_pointed))
    spent = [0.0]
    for name in ("arrived", "began", "passed_over", "ended", "reported", "carried_out", "plan"):
        setattr(engine.planner, name, _timed(getattr(engine.planner, name), spent))
    rng = random.Random(SEED)
    specs = [spec(key, 40_000_000) for key in range(1, adapters + 1)]
    taken = []
    for step in range(steps):
        running = {one.spec.engine_id for one in engine.running.values()}
        while len(engine.held) < held:  # by requests of adapters that do not run: others would begin at once
            engine.submit(rng.choice([of for of in specs if of.engine_id not in running]), rng.randint(1, 64))
        if step == 0:
            spent[0] = 0.0
        engine.step()
        taken.append(spent[0] * 1e6)
        spent[0] = 0.0
    percentiles = quantiles(taken[100:], n=100)
    return mean(taken[100:]), percentiles[49], percentiles[98]


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()  # the thread's own time takes 3 µs to ask for
        try:
            return function(*args, **options)
        finally:
            spent[0] += time.perf_counter() - started

    return timed


def reproduce(rows: list[dict[str, object]], seconds: float) -> None:
    print(HEAD)
    for key, cases in measured().items():
        for one in compare(cases, FITTED.get(key, Timings()), seconds):
            rate, median = one.ratios()
            rows.append({"case": str(one.measured), "who": one.arm, "rate_ratio": rate, "median_ratio": median})
            print(one.line(), flush=True)


def speak(rows: list[dict[str, object]], cases: Iterator[Case], patiences: list[float]) -> None:
    print(f"\n| case | order | {CELLS} |\n" + "|---" * 9 + "|")

    def show(case: Case, who: str, found: Outcome, vllm: Outcome) -> None:
        rows.append({"case": case.name, "who": who, "a_second": case.a_second, **asdict(found)})
        rate = f"{found.requests_per_s:.2f} ({found.requests_per_s / vllm.requests_per_s:.2f}×)"
        waits = (found.mean_first_s, found.hot_p50_s, found.hot_p99_s, found.least_p99_s, found.longest_s)
        cells = [case.name, who, rate, *(f"{wait:.2f}" for wait in waits), f"{found.hit_rate:.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)

    for case in cases:
        vllm = drive(case, Vllm(case))
        show(case, "vLLM's", vllm, vllm)
        show(case, "planner", drive(case, Ours(case)), vllm)
        for patience_s in patiences:
            show(case, f"planner, patience {patience_s:g} s", drive(case, Ours(case, patience_s)), vllm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual ones, of each case")
    parser.add_argument("--patience-s", type=float, nargs="*", default=[], help="others than the default, too")
    parser.add_argument("--fit", action="store_true", help="print timings for what is measured, and end")
    options = parser.parse_args()
    if options.fit:
        for key, cases in measured().items():
            print(f"    {key!r}: {fit(cases)},".replace("'", '"'), flush=True)
        return 0
    rows: list[dict[str, object]] = []
    reproduce(rows, options.seconds)
    for cases in (with_fitted_timings, on_a_gpu, many_adapters):
        speak(rows, cases(options.seconds), options.patience_s)
    print("\n| 1,000 held requests over | planning a step, mean | median | p99 |\n|---|---|---|---|")
    for adapters, is_pointed in ((1000, False), (1000, True), (20, False)):
        mean_us, median_us, p99_us = planning_us(adapters, is_pointed=is_pointed)
        found = {"mean_us": mean_us, "median_us": median_us, "p99_us": p99_us}
        rows.append({"case": "planning", "adapters": adapters, "is_pointed": is_pointed, **found})
        name = f"{adapters:,} adapters, {'100 pointers' if is_pointed else '8 slots'}"
        print(f"| {name} | " + " | ".join(f"{us:.0f} µs" for us in found.values()) + " |", flush=True)
    print(f"\nRaw: {keep('admission', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
