"""Figures of docs/benchmarks/policies.md, for R20: `make bench-policies`.

How often each eviction policy finds an adapter already loaded, and what the rest cost: bytes and seconds of loading.

Replays made-up request traces against a cache of 5 to 40 % of all adapters' bytes. Every miss loads its adapter, and
evicts until it fits. Belady's optimum knows the future: it evicts what is asked for again last. Where all adapters
have one size nothing can be better; where sizes differ it is a heuristic, a bound on neither side.
LRFU's half-life was chosen on the seeds 7 and 101; what is shown is another seed.
Prints a Markdown table and keeps the raw figures in benchmarks/results/policies.json.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from statistics import geometric_mean
from typing import Any

from benchmarks.record import keep
from lora_plugins.scheduler.eviction_policies import EvictionPolicy, Lrfu, Lru

ADAPTERS = 200
REQUESTS = 20_000
SEED = 20260101
EQUAL_MB = 80
SHARES = (0.05, 0.10, 0.20, 0.40)
LATENCY_S, BYTES_PER_S = 0.03, 1e9  # opening, parsing and packing; a network disk's stream


@dataclass(frozen=True)
class Trace:
    name: str
    requests: Sequence[int]
    sizes: Sequence[int]  # by adapter, bytes

    @property
    def costs(self) -> list[float]:
        return [LATENCY_S + size / BYTES_PER_S for size in self.sizes]


@dataclass(frozen=True)
class Outcome:
    hits: int
    loaded_bytes: int
    load_s: float


class Belady:
    """Evicts what is asked for again last; notified of exactly the trace's requests, in their order."""

    def __init__(self, requests: Sequence[int]) -> None:
        self._next = [len(requests)] * len(requests)
        seen: dict[int, int] = {}
        for at in range(len(requests) - 1, -1, -1):
            self._next[at] = seen.get(requests[at], len(requests))
            seen[requests[at]] = at
        self._at = 0
        self._due: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def added(self, key: int, size_bytes: int, cost_s: float) -> None:
        self._due[key] = self._next[self._at]
        heappush(self._heap, (-self._due[key], key))
        self._at += 1

    def used(self, key: int) -> None:
        self.added(key, 0, 0)

    def removed(self, key: int) -> None:
        del self._due[key]

    def victims(self, among: Container[int]) -> Generator[int, None, None]:
        while -self._heap[0][0] != self._due.get(self._heap[0][1]):
            heappop(self._heap)
        yield self._heap[0][1]  # whoever asks for more evicts this one first

    def __len__(self) -> int:
        return len(self._due)


POLICIES: dict[str, Callable[[Sequence[int]], EvictionPolicy[int]]] = {
    "LRU": lambda _: Lru(),
    "LRFU": lambda _: Lrfu(),
    "Belady": Belady,
}


def replay(trace: Trace, budget_bytes: int, policy: EvictionPolicy[int]) -> Outcome:
    held: set[int] = set()
    hits = held_bytes = loaded_bytes = 0
    load_s, sizes, costs = 0.0, trace.sizes, trace.costs
    for key in trace.requests:
        if key in held:
            hits += 1
            policy.used(key)
            continue
        while held and held_bytes + sizes[key] > budget_bytes:
            victim = next(policy.victims(held), None)
            assert victim is not None
            held.remove(victim)
            held_bytes -= sizes[victim]
            policy.removed(victim)
        held.add(key)
        held_bytes += sizes[key]
        loaded_bytes += sizes[key]
        load_s += costs[key]
        policy.added(key, sizes[key], costs[key])
    return Outcome(hits, loaded_bytes, load_s)


def zipf(rng: random.Random, exponent: float) -> list[int]:
    """Popularity falls with the rank; ranks are dealt at random, so that they say nothing about size."""
    adapters = rng.sample(range(ADAPTERS), ADAPTERS)
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(ADAPTERS)))
    return rng.choices(adapters, cum_weights=weights, k=REQUESTS)


def shifting(rng: random.Random, every: int = 1000) -> list[int]:
    """Four of five requests go to ten adapters, others `every` so many requests."""
    requests: list[int] = []
    while len(requests) < REQUESTS:
        hot = rng.sample(range(ADAPTERS), 10)
        requests += (rng.choice(hot) if rng.random() < 0.8 else rng.randrange(ADAPTERS) for _ in range(every))
    return requests


def scans(rng: random.Random) -> list[int]:
    """Twenty hot adapters, and after every 400 requests a walk through 60 of the others, once each, in turn."""
    shuffled = rng.sample(range(ADAPTERS), ADAPTERS)
    hot, cold = shuffled[:20], shuffled[20:]
    requests: list[int] = []
    at = 0
    while len(requests) < REQUESTS:
        requests += rng.choices(hot, k=400)
        requests += (cold[(at + step) % len(cold)] for step in range(60))
        at += 60
    return requests[:REQUESTS]


def sessions(rng: random.Random) -> list[int]:
    """Twelve conversations at a time, interleaved, each of 2 to 40 requests to one adapter: LRU's best case."""
    weights = list(accumulate((rank + 1) ** -0.9 for rank in range(ADAPTERS)))
    requests: list[int] = []
    live: list[list[int]] = []
    while len(requests) < REQUESTS:
        while len(live) < 12:
            live.append([rng.choices(range(ADAPTERS), cum_weights=weights)[0], rng.randint(2, 40)])
        session = rng.choice(live)
        requests.append(session[0])
        session[1] -= 1
        if not session[1]:
            live.remove(session)
    return requests


def traces(seed: int) -> Iterator[Trace]:
    equal = [EQUAL_MB * 10**6] * ADAPTERS
    rng = random.Random(seed)
    mixed = [round(5e6 * 120 ** rng.random()) for _ in range(ADAPTERS)]  # 5 to 600 MB, log-uniform
    for exponent in (0.6, 0.9, 1.2):
        yield Trace(f"Zipf {exponent}", zipf(rng, exponent), equal)
    yield Trace("Zipf 0.9, mixed sizes", zipf(rng, 0.9), mixed)
    for label, sizes in (("", equal), (", mixed sizes", mixed)):
        yield Trace(f"shifting{label}", shifting(rng), sizes)
        yield Trace(f"shifting fast{label}", shifting(rng, 300), sizes)
        yield Trace(f"scans{label}", scans(rng), sizes)
        yield Trace(f"sessions{label}", sessions(rng), sizes)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of loading by LRU's, of LRFU and of Belady's optimum: a row for each trace, a column for each share."""
    load_s = {(row["trace"], row["share"], row["policy"]): row["load_s"] for row in rows}
    by_lru = {key: seconds / load_s[(*key[:2], "LRU")] for key, seconds in load_s.items()}
    lines = [f"| trace | {' | '.join(f'{share:.0%} held' for share in SHARES)} |", "|---" * (1 + len(SHARES)) + "|"]
    for trace in dict.fromkeys(trace for trace, *_ in load_s):
        cells = (f"{by_lru[trace, share, 'LRFU']:.2f} · {by_lru[trace, share, 'Belady']:.2f}" for share in SHARES)
        lines.append(f"| {trace} | {' | '.join(cells)} |")
    for policy in ("LRFU", "Belady"):
        of = [ratio for key, ratio in by_lru.items() if key[2] == policy]
        lines.append(f"\n{policy}: {geometric_mean(of):.2f} in the geometric mean, {min(of):.2f} to {max(of):.2f}.")
    return "\n".join(lines)


def main() -> int:
    rows: list[dict[str, Any]] = []
    for trace in traces(SEED):
        for share in SHARES:
            for name, policy in POLICIES.items():
                outcome = replay(trace, int(sum(trace.sizes) * share), policy(trace.requests))
                rows.append(
                    {
                        "trace": trace.name,
                        "share": share,
                        "policy": name,
                        "requests": len(trace.requests),
                        "hit_rate": outcome.hits / len(trace.requests),
                        "loaded_bytes": outcome.loaded_bytes,
                        "load_s": outcome.load_s,
                    }
                )
    print(table(rows))
    print(f"\nRaw: {keep('policies', rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
