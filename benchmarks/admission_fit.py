"""Timings for the simulation of admission, and how well it then says what real servers did.

What is measured is kept by `python -m benchmarks.manager admission`. `--fit` of `benchmarks.admission` searches timings
for each pair of servers, the same for both arms, by which simulated requests/s and the median time of whole requests
come closest to it; what it prints is kept here as FITTED.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from benchmarks.admission_model import Case, Ours, Outcome, Timings, Vllm, drive
from benchmarks.manager.admission import RESULT
from benchmarks.manager.admission_table import Case as Measured
from benchmarks.manager.admission_table import Figures, cases_of, p50
from benchmarks.manager.scenarios import Serving, Traffic
from benchmarks.record import RESULTS

SEARCHED = ("step_s", "row_s", "adapter_s", "prefill_s", "copy_s", "slowed", "think_s")
FITTING_REQUESTS, ROUNDS = 400, 10
MOST_OFF = 0.15

FITTED: Mapping[tuple[str, str], Timings] = {
    ("12/3", "pointers"): Timings(
        step_s=0.15,
        row_s=0.0073,
        adapter_s=0.0035,
        prefill_s=0.0074,
        copy_s=0.01,
        load_s=0.09,
        slowed=0.15,
        think_s=0.00043,
    ),
    ("16/4", "pointers"): Timings(
        step_s=0.051,
        row_s=0.0043,
        adapter_s=0.0049,
        prefill_s=0.00064,
        copy_s=0.029,
        load_s=0.09,
        slowed=0.15,
        think_s=0.00084,
    ),
    ("40/3", "pointers"): Timings(
        step_s=0.0091,
        row_s=0.00027,
        adapter_s=0.00052,
        prefill_s=0.00027,
        copy_s=0.0052,
        load_s=0.09,
        slowed=0.15,
        think_s=0.0067,
    ),
    ("12/3", "copies"): Timings(
        step_s=0.15,
        row_s=0.0079,
        adapter_s=0.0016,
        prefill_s=0.016,
        copy_s=0.014,
        load_s=0.09,
        slowed=0.075,
        think_s=0.00049,
    ),
    ("16/4", "copies"): Timings(
        step_s=0.068,
        row_s=0.0065,
        adapter_s=0.006,
        prefill_s=0.00051,
        copy_s=0.03,
        load_s=0.09,
        slowed=0.055,
        think_s=0.0091,
    ),
    ("40/3", "copies"): Timings(
        step_s=0.014,
        row_s=0.00019,
        adapter_s=6.6e-05,
        prefill_s=0.001,
        copy_s=0.0041,
        load_s=0.09,
        slowed=0.15,
        think_s=0.0087,
    ),
}


@dataclass(frozen=True)
class Compared:
    """One arm of one traffic."""

    measured: Measured
    arm: str
    real: Figures
    simulated: Outcome

    def ratios(self) -> tuple[float, float]:
        """Simulated against measured: requests/s, and the median of the most asked adapter's whole requests."""
        real_p50_s = p50(self.real.hot_whole_ms or self.real.least_whole_ms) / 1e3
        return self.simulated.requests_per_s / self.real.requests_per_s, self.simulated.hot_p50_s / real_p50_s

    def line(self) -> str:
        rate, median = self.ratios()
        is_off = abs(rate - 1) > MOST_OFF
        return (
            f"| {self.measured} | {self.arm} | {self.real.requests_per_s:.1f} | {self.simulated.requests_per_s:.1f} "
            f"| {rate:.2f}×{' **off**' if is_off else ''} | {median:.2f}× |"
        )


HEAD = "| case | order | requests/s, measured | simulated | ratio | most asked, median: ratio |\n" + "|---" * 6 + "|"


def measured() -> dict[tuple[str, str], list[Measured]]:
    """What was measured, by serving and slots."""
    path = RESULTS / f"{RESULT}.json"
    found: dict[tuple[str, str], list[Measured]] = {}
    for case in cases_of(json.loads(path.read_text())["rows"]) if path.exists() else ():
        if case.vllm.requests_per_s and case.ours.requests_per_s:
            found.setdefault((case.serving.name, case.slots), []).append(case)
    return found


def simulated(of: Serving, slots: str, traffic: Traffic, timings: Timings, seconds: float) -> Case:
    return Case(
        f"{of.name}, {slots}, {traffic.name}", of.adapters, of.slots, of.adapters + 2, of.tokens, traffic, timings,
        is_pointed=slots == "pointers", seconds=seconds,
    )  # fmt: skip


def compare(cases: list[Measured], timings: Timings, seconds: float) -> Iterator[Compared]:
    for case in cases:
        one = simulated(case.serving, case.slots, case.traffic, timings, seconds)
        yield Compared(case, "vLLM's", case.vllm, drive(one, Vllm(one)))
        yield Compared(case, "planner", case.ours, drive(one, Ours(one)))


def fit(cases: list[Measured]) -> Timings:
    """Change one timing after the other, by ever less, as long as that brings simulated and measured closer."""

    def error(timings: Timings) -> float:
        each = (compare([case], timings, FITTING_REQUESTS / case.vllm.requests_per_s) for case in cases)
        return sum(math.log(ratio) ** 2 for found in each for one in found for ratio in one.ratios())

    of, slowest = cases[0].serving, min(case.vllm.requests_per_s for case in cases)
    step_s = of.slots / (slowest * of.tokens)  # one row for each slot
    best = Timings(step_s, row_s=step_s / 20, adapter_s=step_s / 50, prefill_s=step_s / 10, copy_s=step_s / 5)
    least, factor = error(best), 2.0
    for _ in range(ROUNDS):
        before = least
        for name in SEARCHED:
            for by in (factor, 1 / factor):
                changed = replace(best, **{name: asdict(best)[name] * by})
                if (found := error(changed)) < least:
                    best, least = changed, found
        if least > 0.99 * before:
            factor = math.sqrt(factor)
    return replace(best, **{name: float(f"{asdict(best)[name]:.2g}") for name in SEARCHED})
