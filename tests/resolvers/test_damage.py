"""Damage in the store: found before an engine reads it, fetched again, and never an adapter's own fault."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import IncompatibleAdapter, SourceUnavailable
from lora_plugins.events import AdapterFetched, StoreDamaged
from lora_plugins.store.disk_errors import DamagedCopy
from lora_plugins.store.eviction import damaged_in
from lora_plugins.store.store import Store
from tests.make import adapter_files
from tests.resolvers.sources.contract import content
from tests.resolvers.test_resolver import FakeSource, RecordingResolver, clock, make
from tests.store.test_disk_errors import no_descriptors

_ = clock, make
GOOD = adapter_files()


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, as a disk may."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o444)


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
    for bit in random.Random(0).sample(range(8 * len(GOOD[file])), 30):
        flip(first.path / file, bit)
        resolver = make(source)
        resolved = resolver.ask()
        assert resolved.digest == first.digest
        assert content(resolved.path) == GOOD
        assert resolver.kinds.count(StoreDamaged) == resolver.kinds.count(AdapterFetched) == 1


def test_a_flipped_header_is_not_the_adapters_fault(make):
    source = FakeSource("s3", {"sql": GOOD})
    resolver = make(source)
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
    resolver.base = resolver.base.__class__(path="org/tiny", max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        resolver.ask()
    assert content(resolver.store.layout.adapter(resolver.store.layout.digests()[0])) == files
    assert source.fetched == ["sql"] * 2


def test_an_entry_is_hashed_once_per_process(make, monkeypatch):
    source = FakeSource("s3", {"sql": GOOD, "other": GOOD})
    first = make(source).ask()
    resolver = make(source)
    seen = hashes(resolver, monkeypatch)
    for _ in range(3):
        resolver.ask()
        resolver.store.release("sql", first.path)
        resolver.ask("other")
    assert seen == [first.digest]


def test_what_was_fetched_just_now_is_not_hashed_again(make, monkeypatch):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    seen = hashes(resolver, monkeypatch)
    resolver.store.release("sql", resolver.ask().path)
    resolver.ask()
    assert seen == []


def test_what_keeps_failing_is_not_hashed_each_time(make, monkeypatch):
    source = FakeSource("s3", {"sql": GOOD})
    make(source).ask()
    resolver = make(source)
    resolver.base = resolver.base.__class__(path="org/tiny", max_rank=1)
    seen = hashes(resolver, monkeypatch)
    for _ in range(3):
        with pytest.raises(IncompatibleAdapter):
            resolver.ask()
    assert len(seen) == 1


def test_a_failed_check_is_hashed_where_nothing_else_shows_it(make, monkeypatch):
    """A disk that returns other bytes changes no time."""
    source = FakeSource("s3", {"sql": GOOD})
    resolver = make(source)
    first = resolver.ask()
    resolver.store.release("sql", first.path)
    flip(first.path / WEIGHTS_FILE, 64)
    monkeypatch.setattr("lora_plugins.resolvers.versions._HASHED_S", -1)
    monkeypatch.setattr(resolver.store._hashed, "has", lambda digest, identity, max_age_s: max_age_s > 0)
    assert content(resolver.ask().path) == GOOD


def test_two_names_that_find_it_both_get_good_bytes(make):
    source = FakeSource("s3", {"sql": GOOD, "other": GOOD})
    first = make(source).ask()
    flip(first.path / WEIGHTS_FILE, 8 * len(GOOD[WEIGHTS_FILE]) - 1)
    resolver = make(source)

    async def both() -> None:
        names = ("sql", "other")
        found = await asyncio.gather(*(resolver.resolve(name, resolver.base.path) for name in names))
        assert [content(one.path) for one in found] == [GOOD, GOOD]

    asyncio.run(both())
    assert resolver.store.verify(first.digest)


def test_where_the_source_is_away_it_is_not_served(make, clock):
    source = FakeSource("s3", {"sql": GOOD})
    flip(make(source).ask().path / WEIGHTS_FILE, 8 * len(GOOD[WEIGHTS_FILE]) - 1)

    async def away(*_: object) -> None:
        raise SourceUnavailable("away")

    good_fetch, source.fetch = source.fetch, away
    resolver = make(source)
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="away"):
            resolver.ask()
    source.fetch = good_fetch
    clock.now_s += SourceUnavailable.retry_after_s
    assert content(resolver.ask().path) == GOOD


def test_a_read_only_store_does_not_serve_damage(make, monkeypatch):
    source = FakeSource("s3", {"sql": GOOD})
    first = make(source).ask()
    flip(first.path / WEIGHTS_FILE, 8 * len(GOOD[WEIGHTS_FILE]) - 1)
    resolver = make(source)

    def read_only(store: Store, digest: str) -> bool:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Store, "verify", read_only)
    with pytest.raises(DamagedCopy):
        resolver.ask()


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


def test_a_worker_reads_no_damaged_copy(make):
    """It asks its own store by digest, and its source where that has none."""
    source = FakeSource("s3", {"sql": GOOD})
    first = make(source).ask()
    flip(first.path / WEIGHTS_FILE, 8 * len(GOOD[WEIGHTS_FILE]) - 1)
    resolver = make(source)
    assert resolver.store.acquire_sound(first.digest, "sql") is None
    assert not resolver.store.leases.is_held(first.digest, "sql")
    assert content(asyncio.run(resolver.latest("sql", None, resolver.base.path)).path) == GOOD
    assert resolver.store.acquire_sound(first.digest, "sql") == first.path
