"""A source that hangs or fails: its names are refused at once, it is asked now and then, and what is here goes on.

When a breaker opens and what closes it is in `test_breaker.py`; S3 is moto's server behind the fault proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.events import BreakerClosed, BreakerOpened
from lora_plugins.resolvers.breaker import BreakerOpen
from lora_plugins.resolvers.sources.remote_failures import Failure, FailureKind
from lora_plugins.resolvers.sources.retries import NoAnswer
from testbed import faults
from tests.make import BASE
from tests.resolvers.fakes import GOOD, FakeSource, RecordingResolver, failing
from tests.resolvers.sources.contract import turned
from tests.resolvers.sources.object_bed import LIMITS, Bed

DEADLINE_S = 3.0
RECOVERS_S = 10.0  # five where the machine has nothing else to do
NAMES = [f"sql-{number}" for number in range(8)]
BUSY, DENIED = (Failure(kind).as_error("an object store") for kind in (FailureKind.BUSY, FailureKind.DENIED))
SILENCE = NoAnswer("no complete answer within 30 s")


def breakers(resolver: RecordingResolver) -> list[type]:
    return [kind for kind in resolver.kinds if kind in (BreakerOpened, BreakerClosed)]


async def ask(resolver: RecordingResolver, name: str) -> LoRAPluginsError | None:
    """The error of a request for a name."""
    try:
        await resolver.resolve(name, BASE.path)
    except LoRAPluginsError as error:
        return error
    return None


async def ask_until_served(resolver: RecordingResolver, names: Sequence[str]) -> None:
    """Ask as clients do, again after a second, until every name is served."""

    async def wait(name: str) -> None:
        while await ask(resolver, name) is not None:
            await asyncio.sleep(1.0)

    await asyncio.gather(*map(wait, names))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < seconds


def test_names_at_once_wait_one_deadline_and_later_none(make, bed: Bed, logged) -> None:
    later = [f"later-{number}" for number in range(8)]
    for name in (*NAMES, *later):
        bed.put(name, GOOD)
    limits = replace(LIMITS, timeout_s=60.0)
    resolver = make(bed.source(limits=limits, locate_timeout_s=DEADLINE_S, read_timeout_s=60.0))

    async def run() -> None:
        bed.proxy.plan(faults.stall(600.0), times=None)
        with within(5 * DEADLINE_S):
            for error in await asyncio.gather(*(ask(resolver, name) for name in NAMES)):
                assert (error.http_status, error.retry_after_s) == (503, 2)
        bed.proxy.forget()
        await asyncio.sleep(1.1)  # one is asked for now and then, and holds its caller for a moment only
        with within(DEADLINE_S):
            answers = await asyncio.gather(*(ask(resolver, name) for name in later))
        assert {type(error) for error in answers} == {BreakerOpen}
        assert bed.proxy.count() == 1
        bed.proxy.clear()
        with within(RECOVERS_S):
            await ask_until_served(resolver, [*NAMES[:4], *later[:4]])

    asyncio.run(run())
    assert breakers(resolver) == [BreakerOpened, BreakerClosed]
    lines = [record.getMessage() for record in logged.records]
    assert len([line for line in lines if line.startswith("s3 does not answer")]) == 1
    assert len([line for line in lines if line.startswith("s3 answers again")]) == 1


def test_another_source_is_asked_and_what_is_here_goes_on(make) -> None:
    source, local = FakeSource("s3", {"sql": GOOD}), FakeSource("filesystem", {"local": turned()}, remote=False)
    resolver = make(source, local)
    served = resolver.ask("sql")
    source.answers["unknown"] = SILENCE
    with pytest.raises(NoAnswer):
        resolver.ask("unknown")
    assert resolver.ask("local").source == "filesystem"
    # A refresh is refused at once, and the version stays leased in the store.
    with within(DEADLINE_S), pytest.raises(BreakerOpen):
        asyncio.run(resolver.latest("sql", None, BASE.path))
    assert resolver.store.has(served.path)
    assert resolver.store.leases.is_held(served.digest, "sql")


@pytest.mark.parametrize(("error", "opens"), [(BUSY, True), (DENIED, False)], ids=["busy", "denied"])
def test_a_fast_outage_opens_after_a_few_names(serving, error: SourceUnavailable, opens: bool) -> None:
    """Names that are refused open no breaker."""
    source, resolver = serving("s3", dict.fromkeys(NAMES, error) | {"sql": GOOD})

    async def run() -> None:
        for name in NAMES:
            assert await ask(resolver, name) is not None
        assert (len(source.asked) <= 5) is opens
        with within(RECOVERS_S):
            await ask_until_served(resolver, ["sql"])

    asyncio.run(run())
    assert breakers(resolver) == ([BreakerOpened, BreakerClosed] if opens else [])


@pytest.mark.parametrize("error", [SILENCE, BUSY], ids=["silence", "busy"])
def test_fetches_that_fail_are_soon_refused_at_once(make, error: SourceUnavailable) -> None:
    """And nothing that is here."""
    source = FakeSource("s3", dict.fromkeys((*NAMES, "sql"), GOOD) | {"here": turned()})
    make(source).ask("here")
    resolver = make(source)

    async def run() -> None:
        source.while_fetching = failing(error)
        answers = [await ask(resolver, name) for name in NAMES]
        assert [isinstance(answer, BreakerOpen) for answer in answers] == [False] * 3 + [True] * 5
        assert source.fetched == ["here", *NAMES[:3]]
        assert await ask(resolver, "here") is None
        source.while_fetching = lambda: None
        with within(RECOVERS_S):
            await ask_until_served(resolver, ["sql"])

    asyncio.run(run())
    assert breakers(resolver) == [BreakerOpened, BreakerClosed]
    assert {it.source for it in resolver.emitted if isinstance(it, BreakerOpened)} == {"s3 (fetches)"}
