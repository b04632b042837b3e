"""The chain: sources in order, nothing hidden, nothing guessed, each refusal said once."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.events import AdapterRejected, AdapterResolved, AdapterUnknown, Events, SourceFailed
from lora_plugins.logs import LogEvents
from lora_plugins.names import AdapterName
from lora_plugins.resolvers.chain import SourceChain, lora_id
from lora_plugins.resolvers.source import Located
from lora_plugins.settings import BaseMatch, Settings
from tests.make import BASE, adapter_files, put


class FakeSource:
    """Answers from a table of names to directories or errors, and remembers who asked."""

    def __init__(self, label: str, answers: dict[str, Path | Exception] | None = None) -> None:
        self.label = label
        self.answers = answers or {}
        self.asked: list[str] = []

    async def locate(self, name: AdapterName) -> Located | None:
        self.asked.append(str(name))
        answer = self.answers.get(str(name))
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else Located(name, self.label, answer, answer.parent)


class Chain(SourceChain):
    def __init__(self, *sources: FakeSource, **settings: object) -> None:
        self.events: list[object] = []
        super().__init__(Settings(**settings), Events(self.events.append, LogEvents()), sources)
        self.base = BASE

    def ask(self, name: str):
        return asyncio.run(self.resolve(name, BASE.path))


def warnings(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.levelno == logging.WARNING]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return put(tmp_path / "good" / "sql", adapter_files())


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return put(tmp_path / "broken" / "sql", {**adapter_files(), "adapter_config.json": b"{"})


def test_a_found_adapter_is_verified_and_told(good):
    chain = Chain(FakeSource("one", {"sql": good}))
    resolved = chain.ask("sql")
    assert (resolved.name, resolved.path, resolved.source) == ("sql", good, "one")
    (event,) = chain.events
    assert isinstance(event, AdapterResolved)
    assert (event.name, event.source, event.path, event.rank) == ("sql", "one", str(good), 4)
    assert event.size_bytes == sum(file.stat().st_size for file in good.iterdir())


def test_the_path_is_absolute(good, monkeypatch):
    monkeypatch.chdir(good.parent)
    assert Chain(FakeSource("one", {"sql": Path("sql")})).ask("sql").path == good


def test_sources_are_asked_in_order_and_the_first_that_has_it_wins(good, tmp_path):
    other = put(tmp_path / "other" / "sql", adapter_files())
    one, two, three = FakeSource("one"), FakeSource("two", {"sql": good}), FakeSource("three", {"sql": other})
    assert Chain(one, two, three).ask("sql").path == good
    assert (one.asked, two.asked, three.asked) == (["sql"], ["sql"], [])


def test_an_unknown_name_is_none_and_everybody_was_asked():
    sources = [FakeSource("one"), FakeSource("two")]
    chain = Chain(*sources)
    assert chain.ask("sql") is None
    assert [source.asked for source in sources] == [["sql"], ["sql"]]
    assert chain.events == [AdapterUnknown("sql")]


def test_no_sources_know_nothing():
    assert Chain().ask("sql") is None


@pytest.mark.parametrize("name", ["", "../sql", "/sql", "sql/", "./sql", "a//b", "sql@", "a\0b", "a" * 257])
def test_a_malformed_name_asks_no_source(name, good):
    source = FakeSource("one", {name: good})
    chain = Chain(source)
    assert chain.ask(name) is None
    assert source.asked == []
    (event,) = chain.events
    assert isinstance(event, AdapterUnknown)
    assert event.reason


def test_an_unavailable_source_does_not_hide_a_later_one(good, logged):
    chain = Chain(FakeSource("one", {"sql": SourceUnavailable("no answer")}), FakeSource("two", {"sql": good}))
    assert chain.ask("sql").source == "two"
    assert [type(event) for event in chain.events] == [SourceFailed, AdapterResolved]
    (warning,) = warnings(logged)
    assert "[L006]" in warning
    assert "one" in warning


def test_an_unavailable_source_and_nobody_else_is_no_404(logged):
    first = SourceUnavailable("no answer")
    chain = Chain(FakeSource("one", {"sql": first}), FakeSource("two"), FakeSource("three"))
    with pytest.raises(SourceUnavailable) as caught:
        chain.ask("sql")
    assert caught.value is first
    assert caught.value.adapter == "sql"
    assert chain.sources[2].asked == ["sql"]


def test_of_two_unavailable_sources_the_first_is_raised_and_both_are_told(logged):
    one, two = SourceUnavailable("one is away"), SourceUnavailable("two is away")
    chain = Chain(FakeSource("one", {"sql": one}), FakeSource("two", {"sql": two}))
    with pytest.raises(SourceUnavailable, match="one is away"):
        chain.ask("sql")
    assert len(warnings(logged)) == 2


@pytest.mark.parametrize("kind", [InvalidAdapter, AdapterNotFound, IncompatibleAdapter])
def test_a_source_that_has_it_broken_ends_the_search(kind, good):
    later = FakeSource("two", {"sql": good})
    chain = Chain(FakeSource("one", {"sql": kind("x")}), later)
    with pytest.raises(kind, match="adapter 'sql'"):
        chain.ask("sql")
    assert later.asked == []
    assert [type(event) for event in chain.events] == [AdapterRejected]


def test_an_adapter_that_does_not_verify_ends_the_search(broken, good):
    later = FakeSource("two", {"sql": good})
    chain = Chain(FakeSource("one", {"sql": broken}), later)
    with pytest.raises(InvalidAdapter) as caught:
        chain.ask("sql")
    assert (caught.value.adapter, caught.value.file) == ("sql", "adapter_config.json")
    assert later.asked == []
    (event,) = chain.events
    assert (event.name, event.source, event.error) == ("sql", "one", caught.value)


def test_a_broken_adapter_is_warned_of_once_with_its_code(broken, logged):
    chain = Chain(FakeSource("one", {"sql": broken}))
    for _ in range(3):
        with pytest.raises(InvalidAdapter):
            chain.ask("sql")
    (warning,) = warnings(logged)
    assert "[L005]" in warning
    assert "'sql'" in warning
    assert [record.levelno for record in logged.records if "[L005]" in record.getMessage()] == [
        logging.WARNING,
        logging.DEBUG,
        logging.DEBUG,
    ]


def test_a_repaired_adapter_is_served(broken):
    chain = Chain(FakeSource("one", {"sql": broken}))
    with pytest.raises(InvalidAdapter):
        chain.ask("sql")
    put(broken, adapter_files())
    assert chain.ask("sql").path == broken


def test_an_adapter_is_held_against_the_served_model(good):
    chain = Chain(FakeSource("one", {"sql": good}), base_match=BaseMatch.STRICT)
    assert chain.ask("sql")
    put(good, adapter_files(base_model_name_or_path="other/model"))
    with pytest.raises(IncompatibleAdapter, match="other/model"):
        chain.ask("sql")


def test_before_the_server_has_said_more_the_path_is_the_base_model(good):
    chain = Chain(FakeSource("one", {"sql": good}))
    chain.base = None
    assert chain.ask("sql")
    put(good, adapter_files(base_model_name_or_path="other/model"))
    with pytest.raises(IncompatibleAdapter, match=BASE.path):
        chain.ask("sql")


def test_verification_runs_in_the_executor_not_on_the_event_loop(good):
    threads: list[str] = []
    with ThreadPoolExecutor(1, thread_name_prefix="ours") as executor:
        chain = SourceChain(Settings(), Events(), [FakeSource("one", {"sql": good})], executor)
        verify = chain._verify

        def recorded(*arguments):
            threads.append(threading.current_thread().name)
            return verify(*arguments)

        chain._verify = recorded
        assert asyncio.run(chain.resolve("sql", BASE.path))
    assert [name.startswith("ours") for name in threads] == [True]


def test_a_revision_stays_in_the_name(good):
    resolved = Chain(FakeSource("one", {"sql@v2": good})).ask("sql@v2")
    assert resolved.name == "sql@v2"
    assert resolved.lora_id == lora_id("sql@v2") != lora_id("sql")


def test_ids_are_the_same_everywhere_and_fit_vllm():
    # SHA-256, not Python's hash: replicas and restarts must agree.
    assert lora_id("sql") == 1321714995
    ids = {lora_id(f"adapter-{number}") for number in range(2000)}
    assert len(ids) == 2000
    assert min(ids) >= 1
    assert max(ids) < 2**31
