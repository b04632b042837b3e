"""Copies of what is served: whole before an engine reads them, fetched and loaded again where they are damaged."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.api import routes
from lora_plugins.errors import (
    AdapterNotFound,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.events import StoreDamaged
from lora_plugins.lifecycle import pushing, stored_copies
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.pushing import Pushes
from lora_plugins.lifecycle.registry import ServedAdapter
from lora_plugins.lifecycle.stored_copies import watch
from lora_plugins.lifecycle.swapping import ChangeReason
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.store.eviction import damaged_in
from tests.lifecycle.bed import GOOD, Bed
from tests.make import adapter_files, put
from tests.resolvers.sources.contract import content, turned
from tests.virtual_time import let_threads_take, runs


@pytest.mark.parametrize("is_marked", [True, False])
@runs
async def test_what_is_damaged_is_loaded_again(bed, is_marked: bool) -> None:
    """Whether another process has found and marked the damage, or the files were written to."""
    adapter = await bed.load()
    before, digest, path = adapter.engine_id, adapter.digest, await bed.world.ask("sql")
    bed.damage(adapter)
    assert not (is_marked and bed.verify(adapter))
    await bed.copies.look()
    assert content(adapter.version.path) == GOOD
    assert (adapter.digest, adapter.is_damaged, bed.damages) == (digest, False, 1)
    assert adapter.engine_id != before
    again = await bed.world.ask("sql")
    assert again != path, "or prefixes that were computed with damaged weights are found"
    assert bed.resolver.store.digest_at(again) == digest
    assert Path(again).samefile(adapter.version.path)
    assert (bed.loads, bed.world.worker.loads[again]) == (2, 1)
    assert adapter.last_error is None, "the repair has succeeded"
    await bed.copies.look()
    assert (bed.loads, bed.source.fetched) == (2, ["sql"] * 2)
    assert bed.verify(adapter)


@runs
async def test_each_replacement_has_a_path_of_its_own(bed) -> None:
    adapter = await bed.load()
    paths = {await bed.world.ask("sql")}
    for _ in range(3):
        bed.find_damage(adapter)
        await bed.copies.look()
        paths.add(await bed.world.ask("sql"))
    assert len(paths) == 4
    assert {bed.resolver.store.digest_at(path) for path in paths} == {adapter.digest}


@pytest.mark.parametrize("by", ["look", "refresh"])
@runs
async def test_what_another_server_has_replaced_is_loaded_again(bed, by: str) -> None:
    """It has removed the mark, and this server may have loaded what was damaged."""
    adapter = await bed.load()
    path = await bed.world.ask("sql")
    await bed.replaced_elsewhere(adapter)
    if by == "look":
        await bed.copies.look()
    else:
        assert (await bed.world.lifecycle.refresh("sql")).reason is ChangeReason.REPAIRED
    assert (await bed.world.ask("sql") != path, bed.loads) == (True, 2)
    await bed.copies.look()
    assert (await bed.world.lifecycle.refresh("sql")).reason is ChangeReason.UNCHANGED
    assert (bed.loads, bed.source.fetched) == (2, ["sql"])


@runs
async def test_damage_repaired_while_unserved_leaves_no_prefix(bed) -> None:
    adapter = await bed.load()
    path = await bed.world.ask("sql")
    bed.damage(adapter)
    await bed.world.lifecycle.unload("sql", block=False)
    assert not bed.verify(adapter)
    await bed.world.load("sql")
    again = await bed.world.ask("sql")
    assert (again != path, content(Path(again))) == (True, GOOD), "or prefixes of damaged weights are found"
    assert bed.resolver.store.digest_at(again) == adapter.digest


@runs
async def test_a_link_or_mode_changes_nothing(bed) -> None:
    adapter = await bed.load()
    weights = adapter.version.path / WEIGHTS_FILE
    weights.chmod(0o400)
    weights.with_name("link").hardlink_to(weights)
    weights.with_name("link").unlink()
    await bed.copies.look()
    assert (bed.loads, adapter.last_error) == (1, None)


@runs
async def test_all_names_of_damaged_bytes_are_loaded_again(bed) -> None:
    bed.source.answers["other"] = GOOD
    one, two = await bed.load(), await bed.load("other")
    assert one.version.digest == two.version.digest
    await bed.world.lifecycle.pin("sql")
    bed.find_damage(one)
    await bed.copies.look()
    assert bed.damages == 1
    for name in ("sql", "other"):
        assert bed.world.worker.loads[await bed.world.ask(name)] >= 1
    assert (await bed.world.planner.states())(one.engine_id).is_pinned, "again"
    assert (one.is_damaged, two.is_damaged, bed.loads) == (False, False, 4)


@runs
async def test_a_load_by_path_replaces_what_was_damaged_between(bed, tmp_path: Path) -> None:
    """The files are sound again, but the engines may have read what was between."""
    adapter = await bed.load()
    before = await bed.world.ask("sql")
    adapter.is_damaged = True
    put(tmp_path / "same", GOOD)
    await bed.world.lifecycle.load_by_path("sql", str(tmp_path / "same"))
    assert (await bed.world.ask("sql") != before, adapter.is_damaged) == (True, False)


@runs
async def test_a_full_disk_under_a_mended_copy_passes(bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has written to the files and back; the next refresh loads them again."""
    adapter = await bed.load()
    before = await bed.world.ask("sql")
    adapter.is_damaged = True

    def full(digest: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), digest)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(bed.resolver.store, "_note_replaced", full)
        with pytest.raises(OutOfMemory):
            await bed.world.lifecycle.refresh("sql")
    assert adapter.last_error is not None
    await bed.world.lifecycle.refresh("sql")
    assert (await bed.world.ask("sql") != before, adapter.is_damaged) == (True, False)


@runs
async def test_a_request_waits_for_the_good_copy(bed) -> None:
    adapter = await bed.load()
    path = await bed.world.ask("sql")
    bed.damage(adapter)
    assert not bed.resolver.store.verify(adapter.digest)  # by this process, as for another name
    await asyncio.sleep(0)
    assert adapter.is_damaged
    assert await bed.world.ask("sql") != path
    assert content(adapter.version.path) == GOOD
    assert (adapter.is_damaged, bed.loads) == (False, 2)


@pytest.mark.parametrize("is_held", [False, True])
@runs
async def test_what_no_source_has_any_more_is_not_served(bed, is_held: bool) -> None:
    """A source may have another version, where the name stays at its own."""
    adapter = await bed.load()
    digest = adapter.digest
    adapter.held_digest = digest if is_held else None
    bed.find_damage(adapter)
    bed.source.answers["sql"] = turned() if is_held else None
    await bed.copies.look()
    for _ in range(2):
        with pytest.raises(DamagedCopy, match="" if is_held else "its source does not have them any more"):
            await bed.world.ask("sql")
    assert isinstance(adapter.last_error[0], DamagedCopy)
    bed.source.answers["sql"] = GOOD
    assert content(Path(await bed.world.ask("sql"))) == GOOD
    assert adapter.digest == digest


@runs
async def test_while_the_source_is_away_it_is_tried_again(make_bed) -> None:
    bed = make_bed()  # here, as it measures time from its beginning
    adapter = await bed.load()
    bed.find_damage(adapter)
    bed.source.answers["sql"] = SourceUnavailable("away")
    await bed.copies.look()
    asked = len(bed.source.asked)
    await bed.copies.look()
    assert len(bed.source.asked) == asked, "not with every look"
    with pytest.raises(SourceUnavailable, match="away"):
        await bed.world.ask("sql")
    bed.source.answers["sql"] = GOOD
    await asyncio.sleep(20)
    await bed.copies.look()
    assert not adapter.is_damaged


@runs
async def test_an_engine_that_cannot_read_it_has_it_hashed(bed) -> None:
    adapter = await bed.load()
    request = adapter.request
    assert await bed.copies.after_failure(request, InvalidAdapter("x")) is None, "its bytes are good"
    bed.damage(adapter)
    assert await bed.copies.after_failure(request, NoFreeSlot("x")) is None
    assert await bed.copies.after_failure(request, InvalidAdapter("x")) is request
    async with bed.copies.using(request) as taken:
        assert content(Path(taken.lora_path)) == GOOD
        assert taken is adapter.request is not request


@runs
async def test_a_copy_that_is_gone_is_no_damage(bed) -> None:
    adapter = await bed.load()
    shutil.rmtree(adapter.version.path)
    await bed.copies.look()
    assert await bed.copies.after_failure(adapter.request, AdapterNotFound("x")) is None
    assert not bed.verify(adapter)
    assert (bed.loads, bed.damages, damaged_in(bed.resolver.store.layout)) == (1, 0, set())


@runs
@pytest.mark.parametrize("is_fixed", [False, True])
async def test_one_gone_here_and_newer_at_the_source_is_swapped(bed, is_fixed: bool) -> None:
    """A worker serves no other bytes under an id, so without a swap each request is L006 until somebody refreshes."""
    adapter = await bed.load()
    before, gone = adapter.request, adapter.digest
    adapter.held_digest = gone if is_fixed else None
    bed.source.answers["sql"] = adapter_files(rank=4)
    shutil.rmtree(adapter.version.path)
    again = await bed.copies.after_failure(before, SourceUnavailable("another version at the source"))
    if is_fixed:
        assert (again, adapter.digest) == (before, gone)  # the planner's weights in memory go on
        return
    assert again is adapter.request is not before
    assert again.lora_int_id != before.lora_int_id, "no prefix of the version before may be found"
    assert adapter.digest != gone
    async with bed.copies.using(again) as taken:
        assert content(Path(taken.lora_path)) == content(adapter.version.path)


@runs
async def test_what_was_unloaded_meanwhile_is_the_engines_to_answer(bed) -> None:
    request = (await bed.load()).request
    await bed.world.lifecycle.unload("sql", block=False)
    async with bed.copies.using(request) as taken:
        assert taken is request
    await bed.world.settled()
    assert not bed.resolver.store.leases.holders(Path(request.lora_path).name)


@runs
async def test_the_watch_survives_errors_and_ends(bed, logged, monkeypatch) -> None:
    adapter = await bed.load()
    look = bed.copies.look
    answers = iter([ZeroDivisionError(), None, ReferenceError()])

    async def sometimes() -> None:
        if (error := next(answers)) is not None:
            raise error
        await look()

    monkeypatch.setattr(bed.copies, "look", sometimes)
    bed.damage(adapter)
    await watch(weakref.ref(bed.copies))
    assert content(adapter.version.path) == GOOD
    assert "Looking after the copies in the store failed" in logged.text


@runs
async def test_the_watch_ends_with_its_server(bed) -> None:
    copies, events = weakref.ref(bed.copies), bed.resolver.events
    del bed.world.lifecycle, bed.copies  # the events know the world
    bed.resolver.on_abandoned = bed.resolver.store.relieve = bed.resolver.lease_served = lambda *_: None
    gc.collect()
    await watch(copies)
    assert copies() is None
    events.emit(StoreDamaged("0" * 64))


@runs
async def test_a_refresh_says_that_it_has_loaded_again(bed) -> None:
    adapter = await bed.load()
    bed.find_damage(adapter)
    done = await routes.refresh("sql", bed.world.lifecycle)
    assert (done.swapped, done.digest, done.previous_digest) == (True, adapter.digest, adapter.digest)
    assert done.message.endswith("was fetched and loaded again, as its copy was damaged.")
    again = await routes.refresh("sql", bed.world.lifecycle)
    assert (again.swapped, again.message.endswith("serves the newest version.")) == (False, True)
    view = await routes.show("sql", bed.world.lifecycle)
    assert (view.last_error, "store" in view.tiers) == (None, True)
    bed.find_damage(adapter)
    bed.source.answers["sql"] = adapter_files(lora_alpha=32)
    done = await routes.refresh("sql", bed.world.lifecycle)
    assert (done.swapped, done.digest == adapter.digest != done.previous_digest) == (True, True)
    assert done.message.endswith("swapped to a new version.")
    shutil.rmtree(adapter.version.path)
    assert "store" not in (await routes.show("sql", bed.world.lifecycle)).tiers


@runs
async def test_a_rollback_from_a_damaged_version_needs_no_source(bed) -> None:
    adapter = await bed.load()
    old = adapter.digest
    bed.source.answers["sql"] = adapter_files(lora_alpha=32)
    await bed.world.lifecycle.refresh("sql")
    bed.source.answers.clear()
    bed.find_damage(adapter)
    await bed.copies.look()
    assert adapter.is_damaged
    await bed.world.lifecycle.roll_back("sql")
    assert (adapter.digest, adapter.is_damaged, adapter.last_error) == (old, False, None)
    assert bed.resolver.store.digest_at(await bed.world.ask("sql")) == old


@runs
async def test_what_a_request_has_fetched_is_written_down(bed) -> None:
    """A start after a kill began with the version before."""
    adapter = await bed.load()
    before, written = adapter.digest, bed.world.written
    await bed.copies.relieve()
    shutil.rmtree(adapter.version.path)
    bed.source.answers["sql"] = adapter_files(revision="2")
    await bed.world.ask("sql")
    assert adapter.digest != before
    assert bed.world.written == written + 1


@runs
async def test_a_request_that_leaves_leaves_no_lease(bed) -> None:
    """A thread goes on, and leased the copy after the unload had ended the name's leases."""
    adapter = await bed.load()
    await bed.copies.relieve()
    let_threads_take(0.01)
    asking = asyncio.create_task(bed.world.ask("sql"))
    await asyncio.sleep(0.015)
    asking.cancel()
    await bed.world.lifecycle.unload("sql", block=False)
    await asyncio.sleep(1)
    assert asking.cancelled()
    assert not bed.resolver.store.leases.is_ours(adapter.digest)


@runs
async def test_a_newer_version_that_cannot_be_read_is_not_leased(bed, monkeypatch) -> None:
    adapter = await bed.load()
    store, before = bed.resolver.store, adapter.digest
    bed.source.answers["sql"] = adapter_files(revision="2")
    newest = await bed.resolver.latest("sql", None, "/base")
    store.release("sql", newest.path)
    await bed.world.settled()
    is_sound, looks = store.is_sound, Counter[str]()

    def fails(digest: str, **options: float) -> bool:
        looks[digest] += 1
        if digest == newest.digest and looks[digest] > 1:  # the resolver has found it sound
            raise SourceUnavailable("its disk")
        return is_sound(digest, **options)

    monkeypatch.setattr(store, "is_sound", fails)
    with pytest.raises(SourceUnavailable):
        await bed.world.lifecycle.refresh("sql")
    await bed.world.settled()
    assert (looks[newest.digest], adapter.digest) == (2, before)
    assert (store.leases.is_ours(before), store.leases.is_ours(newest.digest)) == (True, False)


@runs
@pytest.mark.parametrize("after_ms", range(0, 70, 3))
async def test_a_rollback_keeps_its_copy_while_room_is_made(bed, after_ms: int) -> None:
    """No source may have it any more: it was evicted behind the answer."""
    adapter = await bed.load()
    bed.source.answers["sql"] = adapter_files(revision="2")
    await bed.world.lifecycle.refresh("sql")
    let_threads_take(0.01)
    rolling = asyncio.create_task(bed.world.lifecycle.roll_back("sql"))
    await asyncio.sleep(after_ms / 1e3)
    await bed.copies.relieve()
    await rolling
    await asyncio.sleep(1)
    assert bed.resolver.store.is_leased("sql", adapter.version.path)


async def two_versions(bed: Bed) -> tuple[ServedAdapter, str]:
    """The name `sql` in its second version, and the digest of its first."""
    adapter = await bed.load()
    before = adapter.digest
    assert before is not None
    bed.source.answers["sql"] = adapter_files(revision="2")
    await bed.world.lifecycle.refresh("sql")
    assert bed.resolver.store.leases.is_ours(before)
    return adapter, before


@runs
async def test_earlier_versions_make_room_while_calls_follow_each_other(bed) -> None:
    """A tenant's calls for one of its names, one behind the other, would keep room from all others."""
    adapter, before = await two_versions(bed)
    let_threads_take(0.01)

    async def call() -> None:
        while True:
            with suppress(AdapterNotFound):
                await bed.world.lifecycle.roll_back("sql", "f" * 64, of_any_name=False)

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert bed.world.server.lock("sql").locked()
    await asyncio.gather(*(bed.copies.relieve() for _ in range(5)))
    await asyncio.sleep(0.2)
    assert not bed.resolver.store.leases.is_ours(before)
    for one in calls:
        one.cancel()
    assert await bed.world.ask("sql") == str(adapter.version.path)


@runs
async def test_an_unloaded_name_keeps_its_running_version_only(bed) -> None:
    adapter, before = await two_versions(bed)
    running = bed.world.start("sql", 10)
    await asyncio.sleep(1)
    unload = asyncio.create_task(bed.world.lifecycle.unload("sql", block=False, timeout_s=86_400))
    await asyncio.sleep(1)
    leases = bed.resolver.store.leases
    assert (leases.is_ours(before), leases.is_ours(adapter.digest)) == (False, True)
    assert (await running, await unload) == (str(adapter.version.path), True)
    await bed.world.settled()
    assert not leases.is_ours(adapter.digest)


@runs
async def test_a_version_loaded_again_outlives_the_unloaded_name(bed) -> None:
    _, before = await two_versions(bed)
    running = bed.world.start("sql", 10)
    await asyncio.sleep(1)
    unload = asyncio.create_task(bed.world.lifecycle.unload("sql", block=False, timeout_s=3600))
    await asyncio.sleep(0)
    loaded = await bed.load()
    await bed.world.lifecycle.roll_back("sql", before[:12])
    assert loaded.digest == before
    await asyncio.gather(running, unload)
    await bed.world.settled()
    assert bed.resolver.store.is_leased("sql", loaded.version.path)


@runs
async def test_rollbacks_at_once_keep_to_the_share(bed) -> None:
    bed.source.answers["chat"] = adapter_files(revision="chat")
    chat = await bed.load("chat")
    bed.source.answers["chat"] = adapter_files(revision="chat 2")
    await bed.world.lifecycle.refresh("chat")
    adapter, _ = await two_versions(bed)
    bed.resolver.store.max_bytes = 3 * adapter.version.size_bytes
    share, pushes = Share("tenant", 0.5), Pushes(bed.world.lifecycle)

    def roll_back(name: str) -> object:
        return bed.world.lifecycle.roll_back(name, admit=partial(pushes.admitted, name, share, lambda _: True))

    done = await asyncio.gather(roll_back("sql"), roll_back("chat"), return_exceptions=True)
    assert [type(one) for one in done].count(OutOfMemory) == 1, done
    assert [one.digest == one.held_digest for one in (adapter, chat)].count(True) == 1
    assert pushes._staying(lambda _: True) == (1, adapter.version.size_bytes)


@runs
async def test_only_so_many_names_stay_as_pushed(make_bed, monkeypatch) -> None:
    bed = make_bed(max_bytes=1 << 30)
    pushes, share = Pushes(bed.world.lifecycle), Share("tenant", 0.5)
    for name in ("sql", "chat"):
        bed.source.answers[name] = GOOD
        adapter = await bed.load(name)
        pushes.left_bytes(name, share, lambda _: True, 1)
        await bed.world.lifecycle.roll_back(name, adapter.digest)
    assert pushes._staying(lambda _: True) == (2, adapter.version.size_bytes)
    monkeypatch.setattr(pushing, "_MOST_NAMES", 2)
    with pytest.raises(OutOfMemory, match="2 other names"):
        pushes.left_bytes("third", share, lambda _: True, 1)
    assert pushes.left_bytes("chat", share, lambda _: True, 1)
    assert pushes.left_bytes("third", share, lambda name: name == "sql", 1)


@runs
async def test_spellings_of_digests_are_served_in_bounds(make_bed, monkeypatch) -> None:
    monkeypatch.setattr(stored_copies, "MOST_BY_DIGEST", 3)
    bed = make_bed()
    adapter = await bed.load()
    names = [f"sql@{adapter.digest[:length]}" for length in range(8, 12)]
    for name in names[:3]:
        await bed.world.lifecycle.load_version(name)
    await bed.copies.look()
    assert bed.world.lifecycle.registry.names() == ["sql", *names[:3]]
    await bed.world.lifecycle.load_version(names[3])
    running = bed.world.start(names[3], 60)
    await asyncio.sleep(1)
    await bed.copies.look()
    assert bed.world.lifecycle.registry.names() == ["sql", names[3]]
    await running
    await bed.world.lifecycle.load_version(names[0])
    assert await bed.world.ask(names[0]) == str(adapter.version.path)


@runs
async def test_a_request_picked_before_an_unload_keeps_its_copy(bed) -> None:
    """vLLM has taken the name's request from its table, and makes tokens of the prompt."""
    adapter = await bed.load()
    world, store = bed.world, bed.resolver.store
    picked = world.table.lora_requests["sql"]
    await world.lifecycle.remove("sql")
    await world.settled()
    bed.source.answers["chat"] = adapter_files(revision="chat")
    store.max_bytes = int(1.5 * adapter.version.size_bytes)
    async with world.lifecycle.copies.using(picked):
        with pytest.raises(LoRAPluginsError):
            await world.load("chat")
        assert adapter.version.path.exists()
    await world.load("chat")
    assert not adapter.version.path.exists()
