"""The table and the goals of `benchmarks.manager admission`, from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.manager.admission import PAIRS
from benchmarks.manager.scenarios import ALONE, DRAWN, FLOOD, SERVINGS, Serving, Traffic, traffic_of

LEAST_MEAN, LEAST_POINTERS, LEAST_COPIES = 1.3, 1.05, 1.0  # requests/s against vLLM's
MOST_HOT, MOST_LEAST, MOST_FLOODED = 1.05, 1.0, 1.3
HEAD = (
    "| adapters/slots | slots are | traffic | requests/s | most asked, whole: p50 ms | p99 ms "
    "| least asked, first token: p99 ms | longest ms | how many |"
)


@dataclass(frozen=True)
class Figures:
    """Of one case and arm, over all stretches. Requests of the most asked adapter, and of the least asked."""

    requests_per_s: float
    hot_whole_ms: list[float]
    least_first_ms: list[float]
    least_whole_ms: list[float]
    memory_mb: float


@dataclass(frozen=True)
class Case:
    """What both arms did of one traffic; `slots` is a key of PAIRS."""

    serving: Serving
    slots: str
    traffic: Traffic
    vllm: Figures
    ours: Figures

    @property
    def gain(self) -> float:
        """Not a number where a machine that stood still let none be answered."""
        return self.ours.requests_per_s / (self.vllm.requests_per_s or math.nan)

    def __str__(self) -> str:
        return f"{self.serving.name}, {self.slots}, {self.traffic.name}"


def cases_of(rows: list[dict]) -> list[Case]:
    """All cases that both arms have rows of."""
    found = []
    for slots, arms in PAIRS.items():
        for serving in SERVINGS:
            for traffic in traffic_of(serving):
                of_case = (serving.name, slots, traffic.name)
                some = [row for row in rows if (row["serving"], row["slots"], row["traffic"]) == of_case]
                each = [[row for row in some if row["arm"] == arm] for arm in arms]
                if all(each):
                    vllm, ours = (_figures(of_arm, serving, traffic) for of_arm in each)
                    found.append(Case(serving, slots, traffic, vllm, ours))
    return found


def _figures(rows: list[dict], serving: Serving, traffic: Traffic) -> Figures:
    adapters = [int(text) for row in rows for text in row["adapter"].split()]
    firsts, wholes = ([float(text) for row in rows for text in row[name].split()] for name in ("first_ms", "whole_ms"))
    hot, least = traffic.most_asked(), traffic.least_asked(serving.adapters)

    def of(wanted: set[int], values: list[float]) -> list[float]:
        return [value for adapter, value in zip(adapters, values, strict=True) if adapter in wanted]

    return Figures(
        statistics.mean(row["requests_per_s"] for row in rows),
        of(hot, wholes),
        of(least, firsts) or [math.nan],
        of(least, wholes) or [math.nan],
        rows[-1]["worker_memory"]["pss_bytes"] / 1e6,
    )


def p50(values: list[float]) -> float:
    return float(np.median(values))


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def table(rows: list[dict]) -> str:
    cases = cases_of(rows)
    lines = [HEAD, "|---" * 9 + "|"]
    for case in cases:
        vllm, ours = case.vllm, case.ours
        hot = [_pair(of(vllm.hot_whole_ms), of(ours.hot_whole_ms)) if vllm.hot_whole_ms else "" for of in (p50, p99)]
        least = [_pair(of(vllm.least_first_ms), of(ours.least_first_ms)) for of in (p99, max)]
        rates = f"{vllm.requests_per_s:.1f} → {ours.requests_per_s:.1f} ({case.gain:.2f}×)"
        count = f"{len(vllm.least_first_ms)}, {len(ours.least_first_ms)}"
        cells = [case.serving.name, case.slots, case.traffic.name, rates, *hot, *least, count]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| adapters/slots | slots are | worker's PSS after the warm-up |", "|---|---|---|"]
    for case in {(case.serving, case.slots): case for case in cases}.values():
        lines.append(f"| {case.serving.name} | {case.slots} | {_pair(case.vllm.memory_mb, case.ours.memory_mb)} MB |")
    return "\n".join([*lines, "", "vLLM's manager → ours (ours against vLLM's).", "", *goals(cases)])


def _pair(vllm: float, ours: float) -> str:
    return f"{vllm:.0f} → {ours:.0f} ({ours / vllm:.2f}×)"


def goals(cases: list[Case]) -> list[str]:
    """What issue 13 asks for, what was found, and whether it is met."""
    drawn = [case for case in cases if case.traffic in DRAWN]
    pointers = [case for case in drawn if case.slots == "pointers"]
    copies = [case for case in drawn if case.slots == "copies"]
    lines = ["| goal | found | |", "|---|---|---|"]

    def say(what: str, ratios: Iterable[tuple[float, object]], bound: float, *, is_least: bool) -> None:
        if listed := [one for one in ratios if not math.isnan(one[0])]:
            ratio, case = (min if is_least else max)(listed, key=lambda one: one[0])
            is_met = ratio >= bound if is_least else ratio <= bound
            worse = sum(one[0] < bound if is_least else one[0] > bound for one in listed)
            mean = statistics.mean(one[0] for one in listed)
            where = f" ({case}); mean {mean:.2f}×, {worse} of {len(listed)} miss it"
            lines.append(f"| {what} {'≥' if is_least else '≤'} {bound}× | {ratio:.2f}×{where} | {_met(is_met)} |")

    for name, some, least in (("pointers", pointers, LEAST_POINTERS), ("copies", copies, LEAST_COPIES)):
        if some:
            mean = statistics.mean(case.gain for case in some)
            bound = f"≥ {LEAST_MEAN}×" if some is pointers else ""
            is_met = _met(mean >= LEAST_MEAN) if some is pointers else ""
            lines.append(f"| {name}: requests/s, mean of {len(some)} {bound} | {mean:.2f}× | {is_met} |")
        say(f"{name}: requests/s of each", ((case.gain, case) for case in some), least, is_least=True)
        with_hot = [case for case in some if case.vllm.hot_whole_ms]
        for what, of in (("p50", p50), ("p99", p99)):
            each = [(of(case.ours.hot_whole_ms) / of(case.vllm.hot_whole_ms), case) for case in with_hot]
            say(f"{name}: most asked adapter's whole requests, {what}", each, MOST_HOT, is_least=False)
        for what, of in (("p99", p99), ("longest wait", max)):
            each = [(of(case.ours.least_first_ms) / of(case.vllm.least_first_ms), case) for case in with_hot]
            say(f"{name}: least asked tenth's first token, {what}", each, MOST_LEAST, is_least=False)
    memory = {(case.serving, case.slots): case for case in pointers}.values()
    each = [(case.ours.memory_mb / case.vllm.memory_mb, case.serving.name) for case in memory]
    say("pointers: worker's memory", each, 1.0, is_least=False)
    for name in PAIRS:
        lines += _of_flood(name, {case.traffic: case for case in cases if case.slots == name})
    return lines


def _of_flood(name: str, cases: Mapping[Traffic, Case]) -> Iterator[str]:
    """What the nine quiet tenants feel of the one that floods."""
    if ALONE not in cases or FLOOD not in cases:
        return
    alone, flood = cases[ALONE], cases[FLOOD]
    beside = p99(flood.ours.least_whole_ms)
    of_own, of_vllm = beside / p99(alone.ours.least_whole_ms), beside / p99(flood.vllm.least_whole_ms)
    vllms = p99(flood.vllm.least_whole_ms) / p99(alone.vllm.least_whole_ms)
    is_met = of_own <= MOST_FLOODED if name == "pointers" else of_vllm <= MOST_LEAST
    bound = f"≤ {MOST_FLOODED}× theirs alone" if name == "pointers" else f"≤ {MOST_LEAST}× vLLM's"
    found = f"{of_own:.2f}× theirs alone (vLLM's {vllms:.2f}×), {of_vllm:.2f}× vLLM's"
    yield f"| {name}: p99 of the nine's whole requests beside a flood {bound} | {found} | {_met(is_met)} |"


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"
