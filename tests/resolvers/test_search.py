"""What the sources are asked, in which order, and that all of their answers are in one result."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.events import Events
from lora_plugins.resolvers import search as search_module
from lora_plugins.resolvers.admission import LookUpLimits, LookUpsBusy
from lora_plugins.resolvers.search import LookedUp, Query, SourceSearch
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import Settings
from tests.make import BASE, adapter_files
from tests.resolvers.fakes import BROKEN, FakeSource, RecordingResolver

SQL = Query(AdapterName("sql"))
NOTHING = Absence("hub", "hub://sql", "nothing")
AWAY = SourceUnavailable("away")


def located(*sources: FakeSource) -> LookedUp:
    return asyncio.run(SourceSearch(Settings(), Events(), sources).locate(SQL, BASE.path))


def test_answers_are_in_the_order_of_the_sources() -> None:
    has_it, later = FakeSource("s3", {"sql": adapter_files()}), FakeSource("other", {"sql": adapter_files()})
    looked = located(FakeSource("away", {"sql": AWAY}), FakeSource("hub"), has_it, later)
    assert list(looked.answers) == ["away", "hub", "s3"]
    away, absence, found = looked.answers.values()
    assert (away, absence, looked.absences) == (AWAY, NOTHING, (NOTHING,))
    assert isinstance(found, RemoteAdapter)
    assert (looked.located, looked.error, later.asked) == ((has_it, found), None, [])


def test_a_flood_is_no_answer_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_LIMITS", LookUpLimits(at_once=1, waiting=0))
    source = FakeSource("hub")

    async def flood() -> LookedUp:
        search = SourceSearch(Settings(absent_ttl_s=0), Events(), [source])
        await search.locate(SQL, BASE.path)
        return await search.locate(SQL, BASE.path)

    looked = asyncio.run(flood())
    assert (type(looked.error), looked.answers) == (LookUpsBusy, {})


def test_one_result_has_answers_version_and_times(tmp_path: Path) -> None:
    resolver = RecordingResolver(tmp_path / "store", FakeSource("hub"), FakeSource("s3", {"sql": adapter_files()}))
    looked = asyncio.run(resolver.look_up("sql", BASE.path))
    assert (list(looked.answers), looked.error) == (["hub", "s3"], None)
    assert looked.resolved is not None
    assert looked.facts is not None
    assert (looked.facts.path, looked.facts.fetched) == (str(looked.resolved.path), True)
    assert min(looked.facts.locate_s, looked.facts.obtain_s, looked.facts.check_s) >= 0
    again = asyncio.run(resolver.look_up("sql", BASE.path))
    assert (again.resolved, again.answers, again.facts) == (looked.resolved, {}, None), "the answer still counts"


def test_a_refused_version_keeps_the_answers_of_its_sources(tmp_path: Path) -> None:
    resolver = RecordingResolver(tmp_path / "store", FakeSource("hub"), FakeSource("s3", {"sql": BROKEN}))
    looked = asyncio.run(resolver.look_up("sql", BASE.path))
    assert (list(looked.answers), looked.resolved) == (["hub", "s3"], None)
    assert isinstance(looked.error, InvalidAdapter)
