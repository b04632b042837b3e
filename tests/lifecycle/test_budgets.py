"""A store smaller than what is served: names have room in turn, and only what is in use is in the way."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, NoFreeSlot, OfAdapter, OutOfMemory, SourceUnavailable
from tests.lifecycle.bed import GOOD, Bed
from tests.make import adapter_files
from tests.repetitions import times
from tests.resolvers.sources.contract import content, turned
from tests.virtual_time import runs

NAMES = [f"sql-{number}" for number in range(12)]
FILES = {name: adapter_files(lora_alpha=number + 1) for number, name in enumerate(NAMES)}
SIZE = max(sum(map(len, files.values())) for files in FILES.values())


def bed_of(make_bed, *, adapters: float = 4, **options: object) -> Bed:
    bed = make_bed(max_bytes=int(adapters * SIZE), **options)
    bed.source.answers = dict(FILES)
    return bed


async def ask(bed: Bed, name: str, seconds: float = 0.0) -> str:
    """As a client does: what is not served yet is loaded first."""
    if bed.world.lifecycle.registry.get(name) is None:
        await bed.world.lifecycle.load(name)
    path = await bed.world.ask(name, seconds, request_id=f"{name}-{seconds}-{len(bed.source.fetched)}")
    assert content(Path(path)) == FILES[name], "there while the engine may read it"
    return path


@runs
async def test_twelve_names_have_room_for_four_in_turn(make_bed) -> None:
    bed = bed_of(make_bed)
    for _ in range(3):
        for name in NAMES:
            await ask(bed, name)
            assert len(bed.resolver.store.layout.digests()) <= 4
    assert len(bed.world.lifecycle.registry.all()) == 12
    assert bed.world.worker.loads.total() == 12, "what is in host memory is not loaded again"


@runs
async def test_what_was_used_last_stays(make_bed) -> None:
    bed = bed_of(make_bed)
    for name in NAMES[:4]:
        await ask(bed, name)
        await asyncio.sleep(1)
    await ask(bed, NAMES[0])  # the first to come, and in use since
    for name in NAMES[4:6]:
        await asyncio.sleep(1)
        await ask(bed, name)
    assert bed.source.fetched == NAMES[:6]
    await ask(bed, NAMES[0])
    await ask(bed, NAMES[3])
    assert bed.source.fetched == NAMES[:6]


@runs
async def test_only_what_runs_is_in_the_way(make_bed) -> None:
    bed = bed_of(make_bed, adapters=2)
    running = [asyncio.create_task(ask(bed, name, seconds=60)) for name in NAMES[:2]]
    await asyncio.sleep(1)
    with pytest.raises(NoFreeSlot, match="engines still use"):
        await ask(bed, NAMES[2])
    await asyncio.gather(*running)
    await ask(bed, NAMES[2])


@pytest.mark.parametrize("how", ["pinned", "rolled back"])
@runs
async def test_what_is_pinned_or_rolled_back_to_is_kept(make_bed, how: str) -> None:
    """The source of the second has another version by now."""
    bed = bed_of(make_bed, adapters=3)
    await ask(bed, NAMES[0])
    if how == "pinned":
        await bed.world.lifecycle.pin(NAMES[0])
    else:
        bed.source.answers[NAMES[0]] = turned()
        await bed.world.lifecycle.refresh(NAMES[0])
        await bed.world.lifecycle.roll_back(NAMES[0])
    fetched = len(bed.source.fetched)
    for name in NAMES[1:6]:
        await ask(bed, name)
    await ask(bed, NAMES[0])
    assert bed.source.fetched[fetched:] == NAMES[1:6]


@runs
async def test_a_version_to_roll_back_to_may_be_gone(make_bed) -> None:
    bed = bed_of(make_bed, adapters=2)
    await ask(bed, NAMES[0])
    first = bed.world.lifecycle.registry.require(NAMES[0]).version.digest
    bed.source.answers[NAMES[0]] = turned()
    await bed.world.lifecycle.refresh(NAMES[0])
    for name in NAMES[1:3]:
        await ask(bed, name)
    for digest in (None, first):
        with pytest.raises(AdapterNotFound, match=r"no such version|no version before"):
            await bed.world.lifecycle.roll_back(NAMES[0], digest)


@runs
async def test_a_new_version_at_the_source_is_what_is_fetched(make_bed) -> None:
    bed = bed_of(make_bed, adapters=1)
    await ask(bed, NAMES[0])
    await ask(bed, NAMES[1])
    bed.source.answers[NAMES[0]] = turned()
    assert content(Path(await bed.world.ask(NAMES[0]))) == turned()


@runs
async def test_a_look_for_new_versions_fetches_nothing_back(make_bed) -> None:
    bed = bed_of(make_bed)
    for name in NAMES:
        await ask(bed, name)
    fetched = list(bed.source.fetched)
    for name in NAMES:
        await bed.world.lifecycle.poll(name)
    await bed.copies.look()
    assert bed.source.fetched == fetched


BROKEN = {**GOOD, CONFIG_FILE: b"{"}


@pytest.mark.parametrize("later", [BROKEN, None, SourceUnavailable("away"), OutOfMemory("full")])
@runs
async def test_what_is_in_memory_outlives_its_source(make_bed, later) -> None:
    bed = bed_of(make_bed, adapters=1)
    await ask(bed, NAMES[0])
    await ask(bed, NAMES[1])
    bed.source.answers[NAMES[0]] = later
    await bed.world.ask(NAMES[0])
    asked, is_of_adapter = len(bed.source.asked), later in (BROKEN, None)
    await bed.world.ask(NAMES[0])
    assert len(bed.source.asked) == asked or not is_of_adapter, "the source is not asked for each request"
    adapter = bed.world.lifecycle.registry.require(NAMES[0])
    assert isinstance(adapter.last_error[0], OfAdapter if is_of_adapter else type(later))
    await bed.world.planner.retire(adapter.engine_id)
    with pytest.raises((AdapterNotFound, InvalidAdapter) if is_of_adapter else type(later)):
        await bed.world.ask(NAMES[0])
    if is_of_adapter:
        bed.source.answers[NAMES[0]] = FILES[NAMES[0]]
        await ask(bed, NAMES[0])
    else:
        await ask(bed, NAMES[1])


@pytest.mark.parametrize("later", [BROKEN, None], ids=["broken", "gone"])
@runs
async def test_a_copy_that_no_source_has_stays(make_bed, later) -> None:
    bed = bed_of(make_bed, adapters=2)
    await ask(bed, NAMES[0])
    bed.source.answers[NAMES[0]] = later
    await bed.world.lifecycle.poll(NAMES[0])
    for name in NAMES[1:6]:
        await ask(bed, name)
    adapter = bed.world.lifecycle.registry.require(NAMES[0])
    await bed.world.planner.retire(adapter.engine_id)
    await ask(bed, NAMES[0])
    bed.source.answers[NAMES[0]] = turned()
    await bed.world.lifecycle.poll(NAMES[0])
    await ask(bed, NAMES[1])
    await ask(bed, NAMES[2])
    assert not adapter.is_only_copy
    assert adapter.version.digest not in bed.resolver.store.layout.digests()


@runs
async def test_another_servers_idle_leases_end_where_room_is_needed(make_bed) -> None:
    bed = bed_of(make_bed, adapters=2)
    for name in NAMES[:2]:
        await ask(bed, name)
    await bed.copies.look()
    other = bed_of(make_bed, adapters=2)
    with pytest.raises(NoFreeSlot):
        await ask(other, NAMES[2])
    await bed.copies.look()
    await ask(other, NAMES[2])
    await ask(bed, NAMES[0])


async def versions_by_digest(bed: Bed, count: int) -> AsyncIterator[str]:
    """The names of versions of one name, each served by its digest as soon as the source has the version."""
    lifecycle = bed.world.lifecycle
    for number in range(count):
        bed.source.answers["sql"] = adapter_files(lora_alpha=number + 1)
        change = await (lifecycle.refresh("sql") if number else lifecycle.load("sql"))
        name = f"sql@{change.after}"
        assert await lifecycle.load_version(name) is not None
        yield name


@runs
async def test_versions_asked_for_by_digest_make_room(make_bed) -> None:
    """As a trainer does that pushes at each step, and samples from the very version."""
    bed = bed_of(make_bed, adapters=5)
    lifecycle, names = bed.world.lifecycle, []
    async for name in versions_by_digest(bed, 10):
        names.append(name)
        await bed.world.ask(name, request_id=name)
    served = {adapter.name for adapter in lifecycle.registry.all()}
    assert {"sql", names[-1]} <= served
    assert names[0] not in served
    assert await lifecycle.load_version(names[0]) is None, "no copy is left"
    written: list[list[str]] = []
    lifecycle.server.on_change = lambda: written.append([adapter.name for adapter in lifecycle.registry.all()])
    await bed.copies.relieve()
    assert written == [["sql"]], "for the next start"


@runs
async def test_a_version_in_use_or_pinned_makes_no_room(make_bed) -> None:
    bed = bed_of(make_bed, adapters=6)
    lifecycle, kept = bed.world.lifecycle, []
    async for name in versions_by_digest(bed, 8):
        if not kept:
            await lifecycle.pin(name)
        elif len(kept) == 1:
            running = asyncio.create_task(bed.world.ask(name, 60, request_id=name))
            await asyncio.sleep(1)
        kept.append(name)
    assert {*kept[:2]} <= {adapter.name for adapter in lifecycle.registry.all()}
    await running


@runs
async def test_a_prefetch_has_its_copy_first(make_bed) -> None:
    bed = bed_of(make_bed, adapters=1)
    await ask(bed, NAMES[0])
    await ask(bed, NAMES[1])
    await bed.world.lifecycle.prefetch(NAMES[0])
    await bed.world.lifecycle.pin(NAMES[0])
    assert bed.source.fetched == [NAMES[0], NAMES[1], NAMES[0]]


def test_unloaded_names_leave_no_lease(make_bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a lease file: a caller who removes adapters from the store after the answer finds them free."""
    unlink = Path.unlink

    def slowly(path: Path, **options: bool) -> None:
        time.sleep(0.05)
        unlink(path, **options)

    async def run() -> None:  # with real threads, which remove the files
        bed = bed_of(make_bed)
        monkeypatch.setattr(Path, "unlink", slowly)
        for name in NAMES[:3]:
            await ask(bed, name)
            await bed.world.lifecycle.unload(name, block=False)
        store = bed.resolver.store
        assert [store.leases.holders(digest) for digest in store.layout.digests()] == [[]] * 3

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(times(3, short=1)))
@runs
async def test_clients_at_once_are_all_served(make_bed, seed: int) -> None:
    bed, chosen = bed_of(make_bed), random.Random(seed)
    served: Counter[str] = Counter()

    async def client(number: int) -> None:
        for _ in range(25):
            name, seconds = chosen.choice(NAMES), chosen.choice((0.0, 0.01, 0.2))
            for _ in range(20):
                try:
                    if bed.world.lifecycle.registry.get(name) is None:
                        await bed.world.lifecycle.load(name)
                    path = await bed.world.ask(name, seconds, request_id=f"{number}-{served.total()}-{name}")
                except NoFreeSlot:
                    await asyncio.sleep(1)
                    continue
                assert bed.resolver.store.digest_at(path)
                served[name] += 1
                break

    await asyncio.gather(*(client(number) for number in range(4)), looks(bed))
    assert served.total() == 100
    await bed.copies.relieve()
    store = bed.resolver.store
    assert [store.leases.holders(digest) for digest in store.layout.digests()] == [[]] * len(store.layout.digests())


async def looks(bed: Bed) -> None:
    for _ in range(20):
        await asyncio.sleep(0.1)
        await bed.copies.look()
