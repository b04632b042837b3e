"""Faults of S3 and the Hub: slow, 503, truncated, reset, damaged, and gone, one after the other at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from benchmarks.soak.journal import Journal
from benchmarks.soak.oracle import Oracle
from testbed import faults
from testbed.faults import Fault
from testbed.hub import Hub
from testbed.proxy import FaultProxy

# How long after a fault a request may still be refused for it: it shares an answer that began meanwhile.
_AFTER_S = 45.0
_MOST_S = 8.0


class SourceFaults:
    """Injects them while a soak runs."""

    def __init__(self, seed: int, proxies: dict[str, FaultProxy], hub: Hub, oracle: Oracle, journal: Journal) -> None:
        self._rng = random.Random(f"{seed}-faults")
        self._proxies = proxies
        self._hub = hub
        self._oracle = oracle
        self._journal = journal
        self.idle = asyncio.Lock()  # held while a fault is there, and by whoever wants none

    async def run(self, done: asyncio.Event, pause_s: float) -> None:
        """Until `done`; a fault begins `pause_s` after the last one has ended, on average."""
        while not done.is_set():
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            source, lasts_s = self._rng.choice(sorted(self._proxies)), _MOST_S * self._rng.random()
            name, make = self._rng.choice(_FAULTS)
            times = self._rng.choice((1, 3, None, None))
            fault = make(self._rng)
            async with self.idle:
                if not done.is_set():
                    await self._inject(source, name, fault, times, lasts_s)
            for proxy in self._proxies.values():
                proxy.forget()
            self._hub.forget()

    async def _inject(self, source: str, name: str, fault: Fault | None, times: int | None, lasts_s: float) -> None:
        proxy, windows = self._proxies[source], self._oracle.faults_of(source)
        windows.open(0, time.monotonic())
        self._journal.write("fault", name, source, lasts_s, times=times)
        if fault is None:
            await asyncio.to_thread(proxy.refuse)
        else:
            # A listing with a changed byte may say anything; weights have a digest that they are compared with.
            proxy.plan(fault, times=times, path=r"safetensors" if name == "damaged" else "")
        await asyncio.sleep(lasts_s)
        proxy.clear()
        if fault is None:
            await asyncio.to_thread(proxy.refuse, False)
        windows.close(0, time.monotonic() + _AFTER_S)


_FAULTS: tuple[tuple[str, Callable[[random.Random], Fault | None]], ...] = (
    ("slow", lambda rng: faults.throttle(20_000 + 200_000 * rng.random())),
    ("stall", lambda rng: faults.stall(3 * rng.random(), after=rng.choice((None, 100, 5_000)))),
    ("503", lambda rng: faults.slow_down(rng.choice((None, 1)))),
    ("500", lambda rng: faults.server_error()),
    ("truncated", lambda rng: faults.short(rng.choice((0, 100, 5_000)))),
    ("shortened", lambda rng: faults.wrong_length(-rng.choice((1, 100)))),
    ("reset", lambda rng: faults.reset(rng.choice((0, 100, 5_000)))),
    ("damaged", lambda rng: faults.flip(rng.randrange(5_000))),
    ("gone", lambda rng: None),
)
