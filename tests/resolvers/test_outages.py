"""A source that hangs: its names are refused at once, it is asked now and then, and what is here goes on.

S3 is moto's server behind the fault proxy; a look-up's deadline is a second here.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import BreakerClosed, BreakerOpened, Event, Events
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers.breaker import BreakerOpen
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.source import Source
from lora_plugins.settings import Settings
from testbed import faults
from tests.make import BASE, adapter_files, put
from tests.resolvers.sources.object_bed import LIMITS, Bed, bed, s3, shared_proxy

_ = (bed, s3, shared_proxy)
DEADLINE_S = 3.0
RECOVERS_S = 10.0  # five where the machine has nothing else to do
HANG = faults.stall(600.0)
NAMES = [f"sql-{number}" for number in range(40)]
OBJECTS = r"^/[^?]+/loras/"  # no LISTs


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, in real time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Outage:
    """A resolver over the bed's S3, and the sources before and after it."""

    def __init__(self, bed: Bed, *others: Source, deadline_s: float = 60.0, fetch_timeout_s: float = 60.0) -> None:
        self.bed = bed
        self.breakers: list[Event] = []
        # One answer may take the deadline: the worst case, in which nothing is tried twice.
        limits = replace(LIMITS, timeout_s=fetch_timeout_s)
        s3_source = bed.source(read_timeout_s=30.0, locate_timeout_s=deadline_s, limits=limits)
        self.resolver = AdapterResolver(
            Settings(absent_ttl_s=0.001, revalidate_s=0.001),
            Events(self._record, LogEvents()),
            bed.store,
            [s3_source, *others],
        )
        self.resolver.base = BASE

    def _record(self, event: Event) -> None:
        if isinstance(event, BreakerOpened | BreakerClosed):
            self.breakers.append(event)

    async def ask(self, name: str) -> tuple[LoRAPluginsError | None, float]:
        """The error of a request for a name, and how long it took."""
        began = time.perf_counter()
        try:
            await self.resolver.resolve(name, BASE.path)
        except LoRAPluginsError as error:
            return error, time.perf_counter() - began
        return None, time.perf_counter() - began

    async def ask_until_served(self, names: Sequence[str]) -> float:
        """Ask as clients do, again after a second, until every name is served; the seconds until the last refusal."""
        began, refused_s = time.perf_counter(), 0.0

        async def wait(name: str) -> None:
            nonlocal refused_s
            while (await self.ask(name))[0] is not None:
                refused_s = time.perf_counter() - began
                await asyncio.sleep(1.0)

        await asyncio.gather(*map(wait, names))
        return refused_s

    def put(self, *names: str) -> None:
        for name in names:
            self.bed.put(name, adapter_files())


@runs
async def test_names_after_one_another_wait_one_deadline_together(bed: Bed, logged) -> None:
    outage = Outage(bed, deadline_s=DEADLINE_S)
    outage.put(*NAMES)
    bed.proxy.plan(HANG, times=None)
    began = time.perf_counter()
    for name in NAMES:
        error, _ = await outage.ask(name)
        assert error is not None
        assert (error.http_status, error.retry_after_s) == (503, 2)
    assert time.perf_counter() - began < 5 * DEADLINE_S
    assert bed.proxy.count() <= 2
    bed.proxy.clear()
    assert await outage.ask_until_served(NAMES[:8]) <= RECOVERS_S
    assert [type(event) for event in outage.breakers] == [BreakerOpened, BreakerClosed]
    lines = [record.getMessage() for record in logged.records]
    assert len([line for line in lines if line.startswith("s3 does not answer")]) == 1
    assert len([line for line in lines if line.startswith("s3 answers again")]) == 1


@runs
async def test_names_at_once_wait_one_deadline_and_later_none(bed: Bed) -> None:
    outage = Outage(bed, deadline_s=DEADLINE_S)
    later = [f"later-{number}" for number in range(40)]
    outage.put(*NAMES, *later)
    bed.proxy.plan(HANG, times=None)
    answers = await asyncio.gather(*map(outage.ask, NAMES))
    assert max(took_s for _, took_s in answers) < 5 * DEADLINE_S
    bed.proxy.forget()
    answers = await asyncio.gather(*map(outage.ask, later))
    assert all(isinstance(error, BreakerOpen) for error, _ in answers)
    assert max(took_s for _, took_s in answers) < DEADLINE_S
    assert bed.proxy.count() <= 1
    bed.proxy.clear()
    assert await outage.ask_until_served([*NAMES[:4], *later[:4]]) <= RECOVERS_S


@runs
async def test_a_long_outage_is_asked_now_and_then(bed: Bed) -> None:
    outage = Outage(bed, deadline_s=DEADLINE_S)
    outage.put("sql")
    bed.proxy.plan(HANG, times=None)
    await outage.ask("sql")
    bed.proxy.forget()
    began = time.perf_counter()
    while time.perf_counter() - began < 7.0:
        _, took_s = await outage.ask("sql")
        assert took_s < DEADLINE_S, "a look-up that is admitted holds its caller for a moment only"
        await asyncio.sleep(0.02)
    assert 3 <= bed.proxy.count() <= 8
    bed.proxy.clear()
    assert await outage.ask_until_served(["sql"]) <= RECOVERS_S


@runs
async def test_another_source_is_asked_and_what_is_here_goes_on(bed: Bed, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    put(root / "local", adapter_files())
    outage = Outage(bed, FilesystemSource(root), deadline_s=DEADLINE_S)
    outage.put("sql")
    await outage.ask_until_served(["sql"])
    served = outage.resolver.known.last("sql")
    assert served is not None
    bed.proxy.plan(HANG, times=None)
    await outage.ask("unknown")
    error, took_s = await outage.ask("local")
    assert error is None
    assert took_s < DEADLINE_S
    # A refresh is refused at once, and the version stays leased in the store.
    began = time.perf_counter()
    error = None
    try:
        await outage.resolver.latest("sql", None, BASE.path)
    except LoRAPluginsError as refused:
        error = refused
    assert isinstance(error, BreakerOpen)
    assert time.perf_counter() - began < DEADLINE_S
    assert outage.resolver.store.has(served.path)
    assert outage.resolver.store.leases.is_held(served.digest, "sql")


@runs
async def test_refused_names_and_denials_open_no_breaker(bed: Bed) -> None:
    outage = Outage(bed)
    outage.put("sql")
    bed.proxy.plan(faults.denied(), times=None)
    for name in NAMES[:10]:
        assert (await outage.ask(name))[0] is not None
    bed.proxy.clear()
    assert (await outage.ask("sql"))[0] is None
    assert outage.breakers == []


@runs
async def test_a_fast_outage_opens_after_a_few_names(bed: Bed) -> None:
    outage = Outage(bed)
    outage.put(*NAMES)
    bed.proxy.plan(faults.server_error(503), times=None)
    for name in NAMES:
        assert (await outage.ask(name))[0] is not None
    assert bed.proxy.count() <= 5 * 3 + 3
    bed.proxy.clear()
    assert await outage.ask_until_served(NAMES[:8]) <= RECOVERS_S


@runs
async def test_fetches_that_hang_are_soon_refused_at_once(bed: Bed) -> None:
    outage, names = Outage(bed, fetch_timeout_s=2.0), NAMES[:8]
    outage.put(*names)
    bed.proxy.plan(HANG, times=None, path=OBJECTS)
    for name in names[:3]:
        error, _ = await outage.ask(name)
        assert "no complete answer within 2 s" in str(error)
    bed.proxy.forget()
    for name in names[3:]:
        error, _ = await outage.ask(name)
        assert isinstance(error, BreakerOpen)
    assert bed.proxy.count(path=OBJECTS) == 0
    bed.proxy.clear()
    assert await outage.ask_until_served(names) <= RECOVERS_S
    assert [type(event) for event in outage.breakers] == [BreakerOpened, BreakerClosed]
    assert {event.source for event in outage.breakers} == {"s3 (fetches)"}


@runs
async def test_fetches_that_fail_refuse_nothing_that_is_here(bed: Bed) -> None:
    before, outage = Outage(bed), Outage(bed)
    outage.put("sql", *NAMES[:4])
    await before.ask_until_served(["sql"])
    bed.proxy.plan(faults.server_error(503), times=None, path=OBJECTS)
    answers = [await outage.ask(name) for name in NAMES[:4]]
    assert [isinstance(error, BreakerOpen) for error, _ in answers] == [False] * 3 + [True]
    assert (await outage.ask("sql"))[0] is None
