"""Versions of names: refreshed, leased while a name needs them, found again by digest."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.events import AdapterConfirmed, AdapterFetched
from tests.make import BASE, adapter_files
from tests.resolvers.sources.contract import content, turned
from tests.resolvers.test_resolution import Chain, FakeSource, make

_ = make
GOOD = adapter_files()


def newest(chain: Chain, name: str = "sql"):
    return asyncio.run(chain.latest(name, None, BASE.path))


def of_digest(chain: Chain, name: str, prefix: str, **more: bool):
    return asyncio.run(chain.of_digest(name, prefix, **more))


# --- the newest version


def test_a_refresh_asks_the_source_whatever_it_answered_before(make):
    source = FakeSource("s3")
    chain = make(source)
    assert chain.ask() is None
    source.answers["sql"] = GOOD
    assert chain.ask() is None, "believed for its time"
    first = newest(chain)
    assert content(first.path) == GOOD
    assert chain.ask() is first
    source.answers["sql"] = turned()
    assert chain.ask() is first, "not asked again within its time"
    second = newest(chain)
    assert content(second.path) == turned()
    assert chain.ask() is second
    del source.answers["sql"]
    assert newest(chain) is None
    assert chain.ask() is None
    assert content(second.path) == turned()


def test_a_version_that_has_not_changed_is_only_confirmed(make):
    chain = make(FakeSource("s3", {"sql": GOOD}))
    first = chain.ask()
    emitted = list(chain.emitted)
    assert newest(chain) is first
    assert chain.emitted == [*emitted, AdapterConfirmed("sql", "s3")]


def test_no_name_is_none(make):
    source = FakeSource("s3")
    assert newest(make(source), "../sql") is None
    assert source.asked == []


def test_no_later_source_stands_in_for_an_unavailable_origin(make):
    one, two = FakeSource("one", {"sql": GOOD}), FakeSource("two", {"sql": turned()})
    chain = make(one, two)
    first = chain.ask()
    one.answers["sql"] = SourceUnavailable("away")
    with pytest.raises(SourceUnavailable, match="away"):
        newest(chain)
    assert content(first.path) == GOOD


def test_another_sources_outage_does_not_hide_a_new_version(make):
    one, two = FakeSource("one", {"sql": SourceUnavailable("away")}), FakeSource("two", {"sql": GOOD})
    chain = make(one, two)
    assert chain.ask().source == "two"
    two.answers["sql"] = turned()
    assert content(newest(chain).path) == turned()


def test_refreshes_share_one_answer_but_not_an_earlier_one(make):
    source = FakeSource("s3", {"sql": GOOD})
    chain = make(source)

    async def run() -> None:
        source.gate = asyncio.Event()
        early = asyncio.create_task(chain.resolve("sql", BASE.path))
        while not source.fetched:
            await asyncio.sleep(0.001)
        refreshes = [asyncio.create_task(chain.latest("sql", None, BASE.path)) for _ in range(5)]
        await asyncio.sleep(0.01)
        source.gate.set()
        assert len({each.digest for each in await asyncio.gather(early, *refreshes)}) == 1

    asyncio.run(run())
    assert source.asked == ["sql"] * 2
    assert source.fetched == ["sql"]


# --- leases


def leased(chain: Chain, resolved) -> bool:
    return bool(chain.store.leases.holders(resolved.digest))


def test_a_version_is_leased_until_its_name_is_released(make):
    chain = make(FakeSource("s3", {"sql": GOOD}))
    resolved = chain.ask()
    chain.release("other", resolved.path)
    chain.release("sql", resolved.path.with_name("0" * 64))
    assert leased(chain, resolved)
    chain.release("sql", str(resolved.path))
    assert not leased(chain, resolved)


@pytest.mark.parametrize("remote", [True, False])
def test_a_released_version_is_leased_again_when_requested(make, remote):
    source = FakeSource("one", {"sql": GOOD}, remote=remote)
    chain = make(source)
    first = chain.ask()
    chain.release("sql", first.path)
    assert chain.ask() == first
    assert leased(chain, first)
    assert source.fetched == ["sql"]


def test_releasing_a_new_version_keeps_the_old_lease(make):
    source = FakeSource("s3", {"sql": GOOD})
    chain = make(source)
    first = chain.ask()
    source.answers["sql"] = turned()
    second = newest(chain)
    chain.release("sql", second.path)
    assert leased(chain, first)
    assert not leased(chain, second)


def test_one_name_releases_nothing_that_another_is_verifying(make):
    chain = make(FakeSource("s3", {"sql": GOOD, "other": GOOD}))
    first = chain.ask("sql")
    check = chain._versions._check_fits

    def release_meanwhile(directory, base):
        verified = check(directory, base)
        chain.release("sql", first.path)
        assert not chain.store.remove(first.digest)
        return verified

    chain._versions._check_fits = release_meanwhile
    second = chain.ask("other")
    assert second.path == first.path
    assert leased(chain, second)
    chain.release("other", second.path)
    assert not leased(chain, second)


def test_a_new_version_that_does_not_fit_is_not_leased(make):
    source = FakeSource("s3", {"sql": GOOD})
    chain = make(source)
    first = chain.ask()
    source.answers["sql"] = turned()
    chain.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        newest(chain)
    (other,) = set(chain.store.layout.digests()) - {first.digest}
    assert leased(chain, first)
    assert chain.store.remove(other)


# --- by digest


def test_an_earlier_version_is_found_by_its_digest_without_asking(make):
    source = FakeSource("s3", {"sql": GOOD})
    chain = make(source)
    first = chain.ask()
    source.answers["sql"] = turned()
    second = newest(chain)
    chain.release("sql", first.path)
    asked = len(source.asked)
    for prefix in (first.digest, first.digest[:12], first.digest[:8]):
        found = of_digest(chain, "sql", prefix)
        assert (found.name, found.path, found.version, found.uri) == ("sql", first.path, first.version, first.uri)
        assert (found.adapter_id, found.rank, found.size_bytes) == (first.adapter_id, 4, first.size_bytes)
        assert leased(chain, first)
    assert of_digest(chain, "sql", second.digest).path == second.path
    assert len(source.asked) == asked


def test_a_short_unknown_or_empty_prefix_finds_nothing(make):
    chain = make(FakeSource("s3", {"sql": GOOD}))
    digest = chain.ask().digest
    other = "0" if digest[0] != "0" else "1"
    for prefix in ("", digest[:7], other * 8, digest + "0", digest.upper(), "*" * 8):
        assert of_digest(chain, "sql", prefix) is None, prefix


def test_two_versions_of_one_prefix_are_none(make, monkeypatch):
    source = FakeSource("s3", {"sql": GOOD})
    chain = make(source)
    chain.ask()
    source.answers["sql"] = turned()
    newest(chain)
    monkeypatch.setattr("lora_plugins.store.layout.MIN_PREFIX", 0)
    assert of_digest(chain, "sql", "") is None


def test_a_name_does_not_reach_versions_of_another(make):
    chain = make(FakeSource("s3", {"mine": GOOD, "theirs": turned()}))
    chain.ask("mine")
    theirs = chain.ask("theirs")
    assert of_digest(chain, "mine", theirs.digest) is None
    assert of_digest(chain, "unheard-of", theirs.digest) is None
    assert of_digest(chain, "mine", theirs.digest, of_any_name=True).path == theirs.path


def test_after_a_restart_versions_are_found_once_located(make):
    source = FakeSource("s3", {"sql": GOOD})
    before = make(source)
    first = before.ask()
    before.release("sql", first.path)
    source.answers["sql"] = turned()
    after = make(source)
    assert of_digest(after, "sql", first.digest) is None
    assert of_digest(after, "sql", first.digest, of_any_name=True).path == first.path
    after.ask()
    assert of_digest(after, "sql", first.digest).path == first.path
    assert after.kinds.count(AdapterFetched) == 1


def test_a_version_by_digest_is_validated_against_the_base_model(make):
    chain = make(FakeSource("s3", {"sql": GOOD}))
    first = chain.ask()
    chain.release("sql", first.path)
    chain.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter, match="'sql'"):
        of_digest(chain, "sql", first.digest)
    assert not leased(chain, first)


def test_a_damaged_version_is_not_found(make):
    chain = make(FakeSource("s3", {"sql": GOOD}))
    first = chain.ask()
    (first.path / "manifest.json").chmod(0o600)
    (first.path / "manifest.json").write_text("{")
    assert of_digest(chain, "sql", first.digest) is None


def test_a_pickle_by_digest_is_refused_where_not_allowed(make):
    files = {"adapter_config.json": GOOD["adapter_config.json"], "adapter_model.bin": b"pickle"}
    source = FakeSource("s3", {"sql": files})
    digest = make(source, allow_pickle=True).ask().digest
    with pytest.raises(InvalidAdapter, match="LORA_PLUGINS_ALLOW_PICKLE"):
        of_digest(make(source), "sql", digest, of_any_name=True)


def test_a_resolved_adapter_has_digest_uri_rank_and_size(make):
    resolved = make(FakeSource("s3", {"team/sql": GOOD})).ask("team/sql")
    assert resolved.digest == resolved.path.name
    assert Path(resolved.path).is_dir()
    assert (resolved.uri, resolved.asked_uri, resolved.rank) == ("s3://team/sql", "", 4)
    assert resolved.size_bytes == sum(map(len, GOOD.values()))
