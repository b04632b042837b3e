"""Damage in the store: found before an engine reads it, fetched again, and never an adapter's own fault."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import IncompatibleAdapter, SourceUnavailable
from lora_plugins.events import AdapterFetched, StoreDamaged
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.store import Store
from tests.make import adapter_files
from tests.repetitions import times
from tests.resolvers.fakes import GOOD, FakeSource, RecordingResolver, failing
from tests.resolvers.sources.contract import content
from tests.store.test_disk_errors import no_descriptors


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, as a disk may."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o444)


LAST_BIT = 8 * len(GOOD[WEIGHTS_FILE]) - 1


@pytest.fixture
def damaged(make) -> FakeSource:
    """A source, whose one adapter has lost a bit in the store."""
    source = FakeSource("s3", {"sql": GOOD, "other": GOOD})
    flip(make(source).ask().path / WEIGHTS_FILE, LAST_BIT)
    return source


def hashes(resolver: RecordingResolver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which entries are hashed from now on."""
    seen: list[str] = []
    verify = resolver.store.verify
    monkeypatch.setattr(resolver.store, "verify", lambda digest: (seen.append(digest), verify(digest))[1])
    return seen


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE])
def test_any_flipped_bit_is_fetched_again_after_a_restart(make, file):
    source = FakeSource("s3", {"sql": GOOD})
    first = make(source).ask()
    for bit in random.Random(0).sample(range(8 * len(GOOD[file])), times(30, short=6)):
        flip(first.path / file, bit)
        resolver = make(source)
        resolved = resolver.ask()
        assert resolved.digest == first.digest
        assert content(resolved.path) == GOOD
        assert resolver.kinds.count(StoreDamaged) == resolver.kinds.count(AdapterFetched) == 1


def test_a_flipped_header_is_not_the_adapters_fault(serving):
    _, resolver = serving("s3", {"sql": GOOD})
    first = resolver.ask()
    resolver.store.release("sql", first.path)
    flip(first.path / WEIGHTS_FILE, 64)  # the first brace
    assert content(resolver.ask().path) == GOOD
    assert resolver.store.is_sound(first.digest)


def test_what_does_not_fit_is_refused_by_a_good_copy(make):
    files = adapter_files(rank_pattern={"no_module": 8})  # so weights decide
    source = FakeSource("s3", {"sql": files})
    flip(make(source).ask().path / WEIGHTS_FILE, 64)
    resolver = make(source)
    resolver.base = replace(resolver.base, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        resolver.ask()
    assert content(resolver.store.layout.adapter(resolver.store.layout.digests()[0])) == files
    assert source.fetched == ["sql"] * 2


@pytest.mark.parametrize("max_rank", [16, 1])
def test_an_entry_is_hashed_once_per_process(make, monkeypatch, max_rank):
    """Not at all where it was fetched just now, and no more often where it fits nowhere."""
    source = FakeSource("s3", {"sql": GOOD, "other": GOOD})
    before = make(source)
    seen = hashes(before, monkeypatch)
    first = before.ask()
    before.store.release("sql", first.path)
    assert before.ask() == first
    assert seen == []
    resolver = make(source)
    resolver.base = replace(resolver.base, max_rank=max_rank)
    seen = hashes(resolver, monkeypatch)
    for name in ("sql", "sql", "other"):
        with contextlib.nullcontext() if max_rank == 16 else pytest.raises(IncompatibleAdapter):
            resolver.ask(name)
        resolver.store.release(name, first.path)
    assert seen == [first.digest]


def test_a_failed_check_is_hashed_where_nothing_else_shows_it(serving, monkeypatch):
    """A disk that returns other bytes changes no time."""
    _, resolver = serving("s3", {"sql": GOOD})
    first = resolver.ask()
    resolver.store.release("sql", first.path)
    flip(first.path / WEIGHTS_FILE, 64)
    monkeypatch.setattr("lora_plugins.resolvers.versions._HASHED_S", -1)
    monkeypatch.setattr(resolver.store._hashed, "has", lambda digest, identity, max_age_s: max_age_s > 0)
    assert content(resolver.ask().path) == GOOD


def test_two_names_that_find_it_both_get_good_bytes(make, damaged):
    resolver = make(damaged)

    async def both() -> None:
        names = ("sql", "other")
        found = await asyncio.gather(*(resolver.resolve(name, resolver.base.path) for name in names))
        assert [content(one.path) for one in found] == [GOOD, GOOD]
        assert resolver.store.verify(found[0].digest)

    asyncio.run(both())


def test_where_the_source_is_away_it_is_not_served(make, clock, damaged):
    damaged.while_fetching = failing(SourceUnavailable("away"))
    resolver = make(damaged)
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="away"):
            resolver.ask()
    damaged.while_fetching = lambda: None
    clock.now_s += SourceUnavailable.retry_after_s
    assert content(resolver.ask().path) == GOOD


def test_a_read_only_store_does_not_serve_damage(make, damaged, monkeypatch):
    monkeypatch.setattr(Store, "verify", Mock(side_effect=PermissionError(30, "Read-only file system")))
    with pytest.raises(DamagedCopy):
        make(damaged).ask()


def test_a_copy_that_cannot_be_read_now_is_not_damaged(make, monkeypatch):
    """A server out of descriptors while the entry is hashed; the source is away, so a mark would lose it."""
    source = FakeSource("s3", {"sql": GOOD})
    first = make(source).ask()
    resolver = make(source)
    resolver.ask()
    resolver.store.release("sql", first.path)
    with no_descriptors(), pytest.raises(SourceUnavailable):
        resolver.store.is_sound(first.digest, max_age_s=0.0)
    monkeypatch.setattr(source, "fetch", None)
    assert content(resolver.ask().path) == GOOD
    assert not damaged_in(resolver.store.layout)


def test_a_worker_reads_no_damaged_copy(make, damaged):
    """It asks its own store by digest, and its source where that has none."""
    resolver = make(damaged)
    (digest,) = resolver.store.layout.digests()
    assert resolver.store.acquire_sound(digest, "sql") is None
    assert not resolver.store.leases.is_held(digest, "sql")
    found = asyncio.run(resolver.latest("sql", None, resolver.base.path))
    assert content(found.path) == GOOD
    assert resolver.store.acquire_sound(digest, "sql") == found.path
