"""Figures of docs/benchmarks/routing.md#compared, for R39: `make bench-routing`.

Routing policies compared in virtual time: 100,000 adapters on 1,000 replicas.

Requests are Poisson; adapters are asked for by Zipf's law, and a share of them changes places in it all the time. Each
replica holds `PLACES` adapters in memory, least recently used first out; a request whose adapter is not there loads it
first. In the last third one replica dies, one leaves and two join. Replicas report every five seconds.

Adapters moved: how many adapters are sent elsewhere after one replica joined or left, where no adapter was loaded yet.
Decision time is the thread's CPU time in `ranked`, the quickest of three times, as other processes share the cores and
their caches; without Python's garbage collector, which would have the whole simulation to look through.
Prints a Markdown table, keeps the raw figures in benchmarks/results/routing.json, and draws docs/images/routing.svg.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import accumulate
from statistics import mean

from benchmarks.plots import BLUE, GREY, drawing
from benchmarks.record import keep
from benchmarks.routing.policies import (
    BoundedConsistentHashing,
    Counting,
    PlainRendezvous,
    PowerOfTwo,
    RandomChoice,
)
from lora_plugins.routing.affinity import AffinityPolicy
from lora_plugins.routing.residency import Report, Tier

ADAPTERS = 100_000
REPLICAS = 1000
PLACES = 50  # adapters in a replica's memory: half of all adapters fit
BATCH = 8  # requests that a replica computes as fast as one
SERVICE_S = 2.0
LOAD_S = 1.0
MEAN_IN_FLIGHT = 4.0  # per replica, without loading
ZIPF = 1.0
CHANGES_PER_S = 20  # adapters that change their place in Zipf's law with another
REPORT_S = 5.0
SEED = 20261122
RoutingPolicy = AffinityPolicy | Counting
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "affinity": AffinityPolicy,
    "consistent hashing, bounded loads": BoundedConsistentHashing,
    "plain rendezvous": PlainRendezvous,
    "power of two": PowerOfTwo,
    "random": RandomChoice,
}


@dataclass(frozen=True)
class Outcome:
    """Of one policy; `imbalance` is the p99 of the replicas' requests in flight over their mean, over time."""

    policy: str
    cold_rate: float
    cold_rate_after_changes: float
    imbalance: float
    wait_p50_s: float
    wait_p99_s: float
    joined_moved: float
    left_moved: float
    decide_p50_us: float
    decide_p99_us: float
    decide_p99_as_run_us: float


class Popularity:
    """Which adapter is asked for next; some change their popularity with another all the time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order = list(range(ADAPTERS))
        rng.shuffle(self._order)
        self._cumulated = list(accumulate((place + 1) ** -ZIPF for place in range(ADAPTERS)))

    def next(self) -> str:
        place = bisect_left(self._cumulated, self._rng.random() * self._cumulated[-1])
        return f"team-{self._order[place] % 97}/adapter-{self._order[place]}"

    def change(self) -> None:
        """A popular one becomes as rare as another was."""
        popular, other = int(len(self._order) ** self._rng.random()) - 1, self._rng.randrange(ADAPTERS)
        self._order[popular], self._order[other] = self._order[other], self._order[popular]


class Replica:
    """Its memory, and what it computes: beyond `BATCH` requests each takes longer in proportion."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, float] = OrderedDict()  # when it is loaded, the least recently used first
        self.in_flight = 0

    def use(self, adapter: str, now: float) -> tuple[bool, float]:
        """Whether it was cold, and when it is loaded."""
        is_cold = adapter not in self.held
        if is_cold:
            self.held[adapter] = now + LOAD_S
            if len(self.held) > PLACES:
                self.held.popitem(last=False)
        self.held.move_to_end(adapter)
        return is_cold, max(now, self.held[adapter])

    def report(self, now: float) -> Report:
        there = {adapter: Tier.HOST for adapter, ready in self.held.items() if ready <= now}
        return Report(there, PLACES, self.in_flight)


def simulate(name: str, requests: int) -> Outcome:
    rng = random.Random(SEED)
    popularity = Popularity(rng)
    policy, replicas, total = POLICIES[name](), {}, 0
    for number in range(REPLICAS):
        replicas[f"replica-{number}"] = Replica()
        policy.join(f"replica-{number}")
    rate = REPLICAS * MEAN_IN_FLIGHT / SERVICE_S
    now, events = 0.0, []
    # Replicas that have just been made all report at different times.
    for number in range(REPLICAS):
        heappush(events, (rng.random() * REPORT_S, number, "report", f"replica-{number}", ""))
    serial = REPLICAS
    cold, waits, taken, as_run, loads = [], [], [], [], []
    what = ("die", "join", "leave", "join")
    changes = {requests * 2 // 3 + number * requests // 15: change for number, change in enumerate(what)}
    for request in range(requests):
        now += rng.expovariate(rate)
        while events and events[0][0] <= now:
            at, _, kind, replica, adapter = heappop(events)
            if replica not in replicas:
                continue
            if kind == "report":
                policy.reported(replica, replicas[replica].report(at), at)
                serial += 1
                heappush(events, (at + REPORT_S, serial, "report", replica, ""))
            else:
                replicas[replica].in_flight -= 1
                total -= 1
                policy.completed(adapter, replica, at)
        if rng.random() < CHANGES_PER_S / rate:
            popularity.change()
        if request in changes:
            serial += 1
            if changes[request] == "join":
                replicas[f"replica-{serial}"] = Replica()
                policy.join(f"replica-{serial}")
                heappush(events, (now + REPORT_S, serial, "report", f"replica-{serial}", ""))
            else:
                gone = rng.choice(list(replicas))
                total -= replicas.pop(gone).in_flight
                policy.leave(gone)
        adapter = popularity.next()
        chosen, first_us, quickest_us = decide(policy, adapter, now)
        taken.append(quickest_us)
        as_run.append(first_us)
        policy.routed(adapter, chosen, now)
        replica = replicas[chosen]
        is_cold, ready = replica.use(adapter, now)
        replica.in_flight += 1
        total += 1
        cold.append(is_cold)
        slower = max(1.0, replica.in_flight / BATCH)
        waits.append(ready - now + 0.05 * slower + (slower - 1) * SERVICE_S)
        serial += 1
        ends = ready + rng.expovariate(1 / SERVICE_S) * slower
        heappush(events, (ends, serial, "end", chosen, adapter))
        if request > requests // 3 and request % max(1, requests // 50) == 0:
            sizes = sorted(it.in_flight for it in replicas.values())
            loads.append(sizes[int(len(sizes) * 0.99)] / max(1e-9, mean(sizes)))
    third = requests // 3
    waits, taken, as_run = (sorted(it[third:]) for it in (waits, taken, as_run))
    joined, left = moved(POLICIES[name], 2 if name == "plain rendezvous" else 20)
    return Outcome(
        name,
        mean(cold[third : 2 * third]),
        mean(cold[2 * third :]),
        mean(loads),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.99)],
        joined,
        left,
        taken[len(taken) // 2],
        taken[int(len(taken) * 0.99)],
        as_run[int(len(as_run) * 0.99)],
    )


def decide(policy: RoutingPolicy, adapter: str, now: float) -> tuple[str, float, float]:
    """The replica that is chosen, and the microseconds that it took the first time, and the quickest of three."""
    taken = []
    for _ in range(1 if isinstance(policy, PlainRendezvous) else 3):
        started = time.thread_time_ns()
        chosen = policy.ranked(adapter, now)[0]
        taken.append((time.thread_time_ns() - started) / 1e3)
    return chosen, taken[0], min(taken)


def moved(make: Callable[[], RoutingPolicy], trials: int, adapters: int = 3000) -> tuple[float, float]:
    """The share of adapters that are sent elsewhere after one joins, and after one leaves, over 1/replicas."""
    policy = make()
    for number in range(REPLICAS):
        policy.join(f"replica-{number}")
    names = [f"adapter-{number}" for number in range(adapters)]

    def homes() -> list[str]:
        return [policy.ranked(name, 0.0)[0] for name in names]

    joined, left = [], []
    before = homes()
    for trial in range(trials):
        policy.join(f"newcomer-{trial}")
        after = homes()
        joined.append(sum(one != other for one, other in zip(before, after, strict=True)) / adapters * (REPLICAS + 1))
        policy.leave(f"newcomer-{trial}")
        before = homes()
        left.append(sum(one != other for one, other in zip(before, after, strict=True)) / adapters * (REPLICAS + 1))
    return mean(joined), mean(left)


HEADINGS = (
    "policy",
    "cold starts",
    "while replicas change",
    "p99 / mean load",
    "wait p50 · p99, s",
    "moved, × 1/N: join · leave",
    "decision p50 · p99, µs",
)


def cells(it: Outcome) -> Iterator[str]:
    yield it.policy
    yield f"{it.cold_rate:.1%}"
    yield f"{it.cold_rate_after_changes:.1%}"
    yield f"{it.imbalance:.2f}"
    yield f"{it.wait_p50_s:.2f} · {it.wait_p99_s:.2f}"
    yield f"{it.joined_moved:.2f} · {it.left_moved:.2f}"
    yield f"{it.decide_p50_us:.0f} · {it.decide_p99_us:.0f}"


def draw(rows: dict) -> None:
    """Cold starts, imbalance and the time of a decision, by policy."""
    found = rows["policies"]
    panels = (
        ("requests that load their adapter", "% of requests", [it["cold_rate"] * 100 for it in found], "{:.1f} %"),
        ("load imbalance", "p99 / mean requests in flight", [it["imbalance"] for it in found], "{:.2f}"),
        ("time of a decision, p99", "µs of CPU, logarithmic", [it["decide_p99_us"] for it in found], "{:.0f}"),
    )
    names = [it["policy"] for it in found]
    with drawing("routing", "Routing policies compared", ncols=3, figsize=(10, 2.9), sharey=True) as (figure, axes):
        for axis, (title, label, values, shape) in zip(axes, panels, strict=True):
            bars = axis.barh(names, values, color=[BLUE if name == "affinity" else GREY for name in names])
            axis.bar_label(bars, [" " + shape.format(value) for value in values], fontsize=8)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel(label, fontsize=8)
            axis.set_xlim(right=max(values) * 1.3)
        axes[2].set_xscale("log")
        axes[2].set_xlim(1, max(panels[2][2]) * 6)
        axes[2].axvline(50, color="grey", lw=0.8, ls="--", label="50 µs")
        axes[2].legend(frameon=False, fontsize=8, loc="lower right")
        axes[0].invert_yaxis()
        axes[0].set_ylabel("policy", fontsize=8)
        many, replicas, places = (rows[name] for name in ("ADAPTERS", "REPLICAS", "PLACES"))
        figure.suptitle(f"{many:,} adapters on {replicas:,} replicas with room for {places} each", fontsize=11)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60_000)
    options = parser.parse_args()
    started = time.perf_counter()
    gc.disable()
    print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
    outcomes = []
    for name in POLICIES:
        outcomes.append(simulate(name, options.requests))
        gc.collect()
        print("| " + " | ".join(cells(outcomes[-1])) + " |", flush=True)
    circumstances = {
        name: globals()[name]
        for name in ("ADAPTERS", "REPLICAS", "PLACES", "BATCH", "SERVICE_S", "LOAD_S", "MEAN_IN_FLIGHT", "ZIPF")
    }
    rows = {"requests": options.requests, **circumstances, "policies": [asdict(it) for it in outcomes]}
    print(f"\nTook {time.perf_counter() - started:.0f} s; raw: {keep('routing', rows).name}")
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
