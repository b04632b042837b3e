"""What names mean to a process: believed for a time, bounded, and never what another name has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_plugins.adapter.names import AdapterName
from lora_plugins.resolvers.known_versions import KnownVersions, ResolvedAdapter
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest, StoredFile
from tests.resolvers.fakes import Clock, FakeSource

SQL = ("sql", "")
AT_SOURCE = (
    FakeSource("s3"),
    RemoteAdapter(AdapterName("sql"), "s3", "s3://sql", "v1", (SourceFile("adapter_config.json", 1),)),
)


class FakeStore:
    """The two answers of a store that the class under test asks for, and the number of looks."""

    def __init__(self) -> None:
        self.held: set[tuple[str, object]] = set()
        self.leases = SimpleNamespace(is_held=lambda digest, holder: (digest, holder) in self.held)
        self.looks, self.is_there = 0, True

    def has(self, directory: Path) -> bool:
        self.looks += 1
        return self.is_there


class Known(KnownVersions):
    def __init__(self, **settings: object) -> None:
        self.store, self.clock = FakeStore(), Clock()
        super().__init__(Settings(**settings), self.store, self.clock)

    def served(
        self, name: str = "sql", digest: str = "a" * 64, uri: str = "s3://b/sql", **more: object
    ) -> ResolvedAdapter:
        version = ResolvedAdapter(name, 1, Path("/store") / digest, "s3", "v1", uri, 10, 4)
        self.store.held.add((digest, name))
        return self.note((name, ""), version, **more)


@pytest.fixture
def known() -> Known:
    return Known()


def manifest(digest: str, uri: str = "s3://b/canary") -> Manifest:
    file = StoredFile("adapter_config.json", 1, "c" * 64)
    return Manifest(digest, uri, "v0", (file,), "2026-01-01T00:00:00Z", file)


def test_a_local_or_disbelieved_answer_is_asked_for_again(known: Known) -> None:
    known.served()
    assert known.believed(SQL) is None
    known.served(is_remote=True)
    known.disbelieve(SQL)
    assert known.believed(SQL) is None


def test_a_version_without_a_lease_is_not_believed(known: Known) -> None:
    version = known.served(is_remote=True)
    known.store.held.clear()
    assert known.believed(SQL) is None
    holder = object()
    other = known.note(SQL, replace(version, holder=holder), is_remote=True)
    known.store.held.add((version.digest, holder))
    assert known.believed(SQL) is other


def test_the_store_is_looked_at_once_a_second(known: Known) -> None:
    version = known.served(is_remote=True)
    for _ in range(3):
        assert known.believed(SQL) is version
    assert known.store.looks == 1
    known.store.is_there = False
    assert known.believed(SQL) is version
    known.clock.now_s += 1
    assert known.believed(SQL) is None
    assert known.store.looks == 2


def test_a_located_adapter_is_taken_once_and_soon(known: Known) -> None:
    assert known.located.pop(SQL, None) is None
    known.located[SQL] = AT_SOURCE
    assert known.believed(SQL) is None
    assert known.located.pop(SQL, None) is AT_SOURCE
    assert known.located.pop(SQL, None) is None
    known.located[SQL] = AT_SOURCE
    known.clock.now_s += 5
    assert known.located.pop(SQL, None) is None


def test_a_name_reaches_its_places_and_its_bytes_only(known: Known) -> None:
    """The canary brought the bytes, so the manifest names the canary's place; the name had the same bytes."""
    same, newer = "a" * 64, "b" * 64
    assert known.reach_of("sql") is None
    known.served("canary", same, "s3://b/canary")
    assert known.reach_of("sql") is None
    known.served("sql", same, "s3://b/sql")
    known.served("other", newer, "s3://b/other")
    reach = known.reach_of("sql")
    assert reach(manifest(same))
    assert reach(manifest(newer, "s3://b/sql")), "of the name's place, by another process"
    assert not reach(manifest(newer))
    assert not known.reach_of("other")(manifest(same))
    assert known.origin("sql", manifest(same)) == ("s3", "s3://b/sql", "v1")
    assert known.origin("other", manifest(same)) == ("s3", "s3://b/canary", "v0")


@pytest.mark.parametrize(
    ("uri", "label"),
    [("file:///a/sql", "filesystem"), ("hf://o/r", "hub"), ("push://sql", "push"), ("gs://b/sql", "gs")],
)
def test_the_label_of_an_unknown_place_is_its_schemes(known: Known, uri: str, label: str) -> None:
    assert known.origin("sql", manifest("a" * 64, uri)) == (label, uri, "v0")


def test_a_later_answer_without_warnings_keeps_the_noted_warnings(known: Known) -> None:
    known.note_warnings("a", ["one"])
    known.note_warnings("a", [])
    assert (known.warnings_of("a"), known.warnings_of("b")) == (("one",), ())
