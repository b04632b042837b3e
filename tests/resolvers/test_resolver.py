"""The resolver of sources: their order, outages, refusals, single flight, and that each version is fetched once."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName, adapter_id
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import INDEX_FILE, PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.events import (
    AbsenceRemembered,
    AdapterConfirmed,
    AdapterDenied,
    AdapterFetched,
    AdapterRejected,
    AdapterResolved,
    AdapterUnknown,
    Events,
    FetchEnded,
    FetchStarted,
    LookUpRefused,
    SourceFailed,
    StoreEvicted,
)
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers import known_versions as known_versions_module
from lora_plugins.resolvers import resolver as resolver_module
from lora_plugins.resolvers import search as search_module
from lora_plugins.resolvers import versions as versions_module
from lora_plugins.resolvers.admission import LookUpLimits, LookUpsBusy
from lora_plugins.resolvers.known_versions import KnownVersions
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.search import SourceSearch
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.remote_failures import Failure, FailureKind
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, VersionChanged, version_of
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store
from lora_plugins.verification.children import Children
from tests.make import BASE, CHAT, adapter_files, put, sharded, weights
from tests.resolvers.sources.contract import content, ranked, turned
from tests.virtual_time import run_in_virtual_time

Files = Mapping[str, bytes]
BROKEN = {**adapter_files(), CONFIG_FILE: b"{"}


class FakeSource:
    """Serves files or raises errors from a table of names, and remembers what it was asked."""

    def __init__(self, label: str, answers: Mapping[str, Files | Exception] | None = None, *, remote: bool = True):
        self.label = label
        self.remote = remote
        self.answers = dict(answers or {})
        self.asked: list[str] = []
        self.asked_for_base: list[str] = []
        self.fetched: list[str] = []
        self.fetched_files: list[str] = []
        self.while_fetching: Callable[[], object] = lambda: None
        self.gate: asyncio.Event | None = None

    def __str__(self) -> str:
        return f"{self.label} ({self.label}://)"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        self.asked.append(str(name))
        self.asked_for_base.append(base_model_name)
        answer = self.answers.get(str(name))
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return Absence(self.label, f"{self.label}://{name}", "nothing")
        files = tuple(SourceFile(file, len(data), str(hash(data))) for file, data in answer.items())
        return RemoteAdapter(name, self.label, f"{self.label}://{name}", version_of(files), files)

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        if not located.is_rest:  # once for each version: the weights come in a call of their own
            self.fetched.append(str(located.name))
        if self.gate is not None:
            await self.gate.wait()
        self.while_fetching()
        for file in located.files:
            self.fetched_files.append(file.name)
            data = self.answers[str(located.name)][file.name]
            if str(hash(data)) != file.etag:
                raise VersionChanged("other bytes")
            (arriving.directory / file.name).write_bytes(data)


class RecordingResolver(AdapterResolver):
    def __init__(self, root: Path, *sources: FakeSource, max_bytes: int | None = None, **settings: object) -> None:
        self.emitted: list[object] = []  # all but what bars of progress are drawn by
        store = Store(root, max_bytes=max_bytes)
        super().__init__(Settings(**settings), Events(self.record, LogEvents()), store, sources)
        self.base = BASE

    def record(self, event: object) -> None:
        if not isinstance(event, FetchStarted | FetchEnded):
            self.emitted.append(event)

    def ask(self, name: str = "sql"):
        return asyncio.run(self.resolve(name, BASE.path))

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.emitted]


@pytest.fixture
def make(tmp_path: Path):
    """A resolver over these sources and the test's one store."""
    return lambda *sources, **settings: RecordingResolver(tmp_path / "store", *sources, **settings)


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the resolvers of this test read off the time for which they remember."""
    clock = Clock()
    for memory in (KnownVersions, SourceSearch):
        monkeypatch.setattr(resolver_module, memory.__name__, partial(memory, timer=clock))
    return clock


def warnings(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.levelno == logging.WARNING]


# --- found, or not


def test_a_found_adapter_is_fetched_verified_and_published(make):
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source)
    resolved = resolver.ask()
    (digest,) = resolver.store.layout.digests()
    path = resolver.store.layout.adapter(digest)
    assert (resolved.name, resolved.path, resolved.source) == ("sql", path, "one")
    assert resolved.version == asyncio.run(source.locate(AdapterName("sql"), "")).version
    assert content(path) == adapter_files()
    assert source.asked_for_base[0] == BASE.path
    fetched, event = resolver.emitted
    size_bytes = sum(map(len, adapter_files().values()))
    assert isinstance(fetched, AdapterFetched)
    assert (fetched.name, fetched.source, fetched.uri, fetched.size_bytes) == ("sql", "one", "one://sql", size_bytes)
    assert isinstance(event, AdapterResolved)
    assert (event.name, event.source, event.path, event.rank) == ("sql", "one", str(path), 4)
    assert (event.size_bytes, event.fetched, event.uri) == (size_bytes, True, "one://sql")
    assert min(event.locate_s, event.obtain_s, event.check_s, fetched.fetch_s) >= 0


def test_sources_are_asked_in_order_and_the_first_wins(make):
    one, two = FakeSource("one"), FakeSource("two", {"sql": adapter_files()})
    three = FakeSource("three", {"sql": turned()})
    assert make(one, two, three).ask().source == "two"
    assert (one.asked, two.asked, three.asked, three.fetched) == (["sql"], ["sql"], [], [])


def test_an_unknown_name_is_none_after_every_source(make):
    sources = [FakeSource("one"), FakeSource("two")]
    resolver = make(*sources)
    assert resolver.ask() is None
    assert [source.asked for source in sources] == [["sql"], ["sql"]]
    absences = [Absence(one, f"{one}://sql", "nothing") for one in ("one", "two")]
    assert resolver.emitted == [AdapterUnknown("sql", absences=tuple(absences))]


def test_no_sources_know_nothing(make):
    assert make().ask() is None


@pytest.mark.parametrize("name", ["", "../sql", "/sql", "sql/", "./sql", "a//b", "sql@", "a\0b", "a" * 257])
def test_a_malformed_name_asks_no_source(name, make):
    source = FakeSource("one", {name: adapter_files()})
    resolver = make(source)
    assert resolver.ask(name) is None
    (event,) = resolver.emitted
    assert not asyncio.run(resolver.has(name, BASE.path))
    assert asyncio.run(resolver.latest(name, None, BASE.path)) is None
    assert source.asked == []
    assert isinstance(event, AdapterUnknown)
    assert event.reason


def test_a_revision_stays_in_the_name(make):
    resolved = make(FakeSource("one", {"sql@v2": adapter_files()})).ask("sql@v2")
    assert resolved.name == "sql@v2"
    assert resolved.adapter_id == adapter_id("sql@v2") != adapter_id("sql")


# --- the order of sources


@pytest.mark.parametrize(
    ("order", "added", "asked"),
    [
        (("filesystem", "s3", "hub"), ("hub", "filesystem", "s3"), ["filesystem", "s3", "hub"]),
        (("hub", "s3", "filesystem"), ("filesystem", "s3", "hub"), ["hub", "s3", "filesystem"]),
        (("hub",), ("filesystem", "s3", "hub"), ["hub", "filesystem", "s3"]),  # left out: last, as they came
        (("s3", "hub"), ("gcs", "hub", "s3", "filesystem"), ["s3", "hub", "gcs", "filesystem"]),
        (("filesystem", "s3", "hub"), ("hub",), ["hub"]),
    ],
)
def test_the_settings_order_the_sources(make, order, added, asked):
    resolver = make(sources=order)
    sources = {label: FakeSource(label) for label in added}
    for label in added:
        resolver.add(sources[label])
    assert [source.label for source in resolver.sources] == asked
    assert resolver.ask() is None
    assert all(source.asked == ["sql"] for source in sources.values())


def test_a_second_source_of_one_label_changes_nothing(make):
    first, second = FakeSource("s3"), FakeSource("s3")
    resolver = make()
    resolver.add(first)
    resolver.add(second)
    assert resolver.sources == [first]


# --- unavailable sources


def test_an_unavailable_source_does_not_hide_a_later_one(make, logged):
    sources = FakeSource("one", {"sql": SourceUnavailable("no answer")}), FakeSource("two", {"sql": adapter_files()})
    resolver = make(*sources)
    assert resolver.ask().source == "two"
    assert resolver.kinds == [SourceFailed, AdapterFetched, AdapterResolved]
    (warning,) = warnings(logged)
    assert "[L006]" in warning
    assert "one" in warning


@pytest.mark.parametrize(
    ("kind", "event"),
    [(FailureKind.HIDDEN, AdapterDenied), (FailureKind.GATED, AdapterDenied), (FailureKind.DENIED, SourceFailed)],
)
def test_one_private_adapter_is_no_outage_of_its_source(make, kind, event):
    """The alert of an outage counts `SourceFailed`; credentials that are refused everywhere are an outage."""
    resolver = make(FakeSource("hub", {"sql": Failure(kind).as_error("a Hub")}))
    with pytest.raises(SourceUnavailable):
        resolver.ask()
    assert resolver.kinds == [event]


def test_an_unavailable_source_is_no_404(make, logged):
    first = SourceUnavailable("no answer")
    resolver = make(FakeSource("one", {"sql": first}), FakeSource("two"), FakeSource("three"))
    with pytest.raises(SourceUnavailable) as caught:
        resolver.ask()
    assert caught.value is first
    assert caught.value.adapter == "sql"
    assert resolver.sources[2].asked == ["sql"]


def test_the_first_of_two_outages_is_raised_both_reported(make, logged):
    one, two = SourceUnavailable("one is away"), SourceUnavailable("two is away")
    resolver = make(FakeSource("one", {"sql": one}), FakeSource("two", {"sql": two}))
    with pytest.raises(SourceUnavailable, match="one is away"):
        resolver.ask()
    assert len(warnings(logged)) == 2


def test_an_outage_is_remembered_for_its_retry_after(make, clock):
    """Of that name: the others are asked for, and so is what a refresh wants to know."""
    source = FakeSource("one", {"sql": SourceUnavailable("no answer"), "chat": adapter_files()})
    resolver = make(source)
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="no answer") as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert (source.asked, resolver.kinds) == (["sql"], [SourceFailed])
    assert resolver.ask("chat").source == "one"
    source.answers["sql"] = adapter_files()
    clock.now_s += caught.value.retry_after_s - 0.1
    with pytest.raises(SourceUnavailable):
        resolver.ask()
    clock.now_s += 0.2
    assert resolver.ask().source == "one"


def test_a_refresh_asks_past_a_remembered_outage(make):
    source = FakeSource("one", {"sql": SourceUnavailable("no answer")})
    resolver = make(source)
    with pytest.raises(SourceUnavailable):
        resolver.ask()
    source.answers["sql"] = adapter_files()
    assert asyncio.run(resolver.latest("sql", None, BASE.path)).source == "one"
    assert resolver.ask().source == "one", "and what it has found is believed"


def test_one_behind_another_wait_for_one_deadline(make):
    """As vLLM has them, which holds a lock for the name while it is resolved."""

    class Hangs(FakeSource):
        async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
            self.asked.append(str(name))
            await asyncio.sleep(30)
            raise SourceUnavailable("no answer within 30 s")

    source = Hangs("one")
    resolver = make(source)

    async def crowd() -> tuple[list[object], float]:
        loop, lock = asyncio.get_running_loop(), asyncio.Lock()

        async def ask() -> object:
            async with lock:
                return await resolver.resolve("sql", BASE.path)

        answers = await asyncio.gather(*(ask() for _ in range(40)), return_exceptions=True)
        return answers, loop.time()

    answers, took_s = run_in_virtual_time(crowd())
    assert {type(answer) for answer in answers} == {SourceUnavailable}
    assert took_s < 31
    assert source.asked == ["sql"]


def test_an_outage_during_the_fetch_is_reported_once(make, clock):
    def fail() -> None:
        raise SourceUnavailable("broken off")

    source, later = FakeSource("one", {"sql": adapter_files()}), FakeSource("two", {"sql": turned()})
    source.while_fetching = fail
    resolver = make(source, later)
    with pytest.raises(SourceUnavailable, match="broken off") as caught:
        resolver.ask()
    assert caught.value.adapter == "sql"
    assert resolver.kinds == [SourceFailed]
    source.while_fetching = lambda: None
    clock.now_s += caught.value.retry_after_s
    assert resolver.ask().source == "one"


# --- adapters that are refused


@pytest.mark.parametrize("kind", [InvalidAdapter, AdapterNotFound, IncompatibleAdapter])
def test_a_source_that_has_it_broken_ends_the_search(kind, make):
    later = FakeSource("two", {"sql": adapter_files()})
    resolver = make(FakeSource("one", {"sql": kind("x")}), later)
    with pytest.raises(kind, match="adapter 'sql'"):
        resolver.ask()
    assert later.asked == []
    assert resolver.kinds == [AdapterRejected]


def test_an_adapter_that_does_not_verify_ends_the_search(make):
    later = FakeSource("two", {"sql": adapter_files()})
    resolver = make(FakeSource("one", {"sql": BROKEN}), later)
    with pytest.raises(InvalidAdapter) as caught:
        resolver.ask()
    assert (caught.value.adapter, caught.value.file) == ("sql", CONFIG_FILE)
    assert later.asked == []
    (event,) = resolver.emitted
    assert (event.name, event.source, event.error) == ("sql", "one", caught.value)
    assert resolver.store.layout.digests() == []


def test_only_a_changed_version_is_fetched_again_after_a_refusal(make):
    source = FakeSource("one", {"sql": BROKEN})
    resolver = make(source)
    errors = []
    for _ in range(3):
        with pytest.raises(InvalidAdapter) as caught:
            resolver.ask()
        errors.append(caught.value)
    assert source.fetched == ["sql"]
    assert len(set(map(str, errors))) == 1
    assert len(set(map(id, errors[1:]))) == 2  # each a new one: raising grows an error's traceback
    source.answers["sql"] = {**BROKEN, CONFIG_FILE: b"["}
    with pytest.raises(InvalidAdapter):
        resolver.ask()
    assert source.fetched == ["sql"] * 2
    source.answers["sql"] = adapter_files()
    assert resolver.ask().source == "one"
    assert source.fetched == ["sql"] * 3


def test_a_refusal_is_of_the_version_not_of_the_name(make):
    # As two names, or two revisions, may stand for one directory.
    source = FakeSource("one", {"sql": BROKEN, "other": BROKEN})
    locate = source.locate

    async def located_together(name, base):
        return replace(await locate(name, base), uri="one://shared")

    source.locate = located_together
    resolver = make(source)
    for name in ("sql", "other"):
        with pytest.raises(InvalidAdapter, match=f"adapter '{name}'"):
            resolver.ask(name)
    assert source.fetched == ["sql"]


@pytest.mark.parametrize(
    "error", [InvalidAdapter("a pipe"), OutOfMemory("a full disk"), SourceUnavailable("x"), OSError(28, "full")]
)
def test_a_failed_fetch_does_not_refuse_the_version(make, clock, error):
    def fail() -> None:
        raise error

    source = FakeSource("one", {"sql": adapter_files()})
    source.while_fetching = fail
    resolver = make(source)
    with pytest.raises(LoRAPluginsError):
        resolver.ask()
    clock.now_s += 5
    source.while_fetching = lambda: None
    assert resolver.ask().source == "one"


def test_an_adapter_is_validated_against_the_served_model(make):
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source, base_match=BaseMatch.STRICT)
    assert resolver.ask()
    source.answers["other"] = adapter_files(base_model_name_or_path="other/model")
    for _ in range(2):
        with pytest.raises(IncompatibleAdapter, match="other/model"):
            resolver.ask("other")
    assert source.fetched == ["sql", "other"]


def test_an_adapter_that_does_not_fit_is_not_leased(make):
    # Or a store with a budget would fill with what no engine reads.
    resolver = make(FakeSource("one", {"sql": adapter_files(rank_pattern={"no_module": 8})}))  # so weights decide
    resolver.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        resolver.ask()
    (digest,) = resolver.store.layout.digests()
    assert resolver.store.leases.holders(digest) == []
    assert resolver.store.remove(digest)


def test_a_lease_that_another_name_needs_stays(make):
    # The same bytes served as one name and then, against a base that has become known, refused as another.
    resolver = make(FakeSource("one", {name: adapter_files() for name in ("sql", "other")}))
    path = resolver.ask("sql").path
    resolver.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        resolver.ask("other")
    assert not resolver.store.remove(path.name)


def test_the_base_path_stands_in_for_the_base_model(make):
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source)
    resolver.base = None
    assert resolver.ask()
    source.answers["other"] = adapter_files(base_model_name_or_path="other/model")
    with pytest.raises(IncompatibleAdapter, match=BASE.path):
        resolver.ask("other")


def test_verification_runs_in_a_thread(make, monkeypatch):
    resolver = make(FakeSource("one", {"sql": adapter_files()}))
    check, threads = versions_module.fit_adapter, []

    def recorded(*arguments):
        threads.append(threading.current_thread())
        return check(*arguments)

    monkeypatch.setattr(versions_module, "fit_adapter", recorded)
    assert resolver.ask()
    assert threading.main_thread() not in threads
    assert len(threads) == 1


@pytest.fixture
def headers_read(monkeypatch):
    """Grows with each adapter whose weights a process is asked to read."""
    asked: list[object] = []
    read = Children.read

    def reading(*arguments, config_only=False):
        if not config_only:
            asked.append(arguments)
        return read(*arguments, config_only=config_only)

    monkeypatch.setattr(Children, "read", reading)
    return asked


def test_what_has_just_arrived_is_read_once(make, headers_read):
    assert make(FakeSource("one", {"sql": adapter_files()})).ask()
    assert len(headers_read) == 1


def test_what_the_store_has_is_compared_with_the_model(make, headers_read):
    answers = {name: adapter_files(base_model_name_or_path="other/model") for name in ("sql", "same")}
    resolver = make(FakeSource("one", answers))
    assert resolver.ask("sql").path == resolver.ask("same").path
    strict = make(FakeSource("one", answers), base_match=BaseMatch.STRICT)  # as after a restart
    for name in answers:
        with pytest.raises(IncompatibleAdapter, match=BASE.path):
            strict.ask(name)
    assert len(headers_read) == 4


# --- what may be fetched: by names and sizes, before the first byte


def files_of(**sizes: int) -> dict[str, bytes]:
    return {CONFIG_FILE: adapter_files()[CONFIG_FILE], **{name: b"x" * size for name, size in sizes.items()}}


MANY = [f"adapter_model-{number:05}-of-00300.safetensors" for number in range(300)]


@pytest.mark.parametrize(
    ("files", "settings", "kind", "says"),
    [
        (files_of(), {}, AdapterNotFound, "the adapter's weights"),
        (files_of(**{PICKLE_FILES[0]: 9}), {}, InvalidAdapter, "LORA_PLUGINS_ALLOW_PICKLE"),
        (files_of(**{PICKLE_FILES[1]: 9}), {}, InvalidAdapter, "LORA_PLUGINS_ALLOW_PICKLE"),
        (adapter_files(), {"max_adapter_bytes": 2000}, InvalidAdapter, "LORA_PLUGINS_MAX_ADAPTER_BYTES"),
        (
            files_of(**{PICKLE_FILES[0]: 2000}),
            {"max_adapter_bytes": 2000, "allow_pickle": True},
            InvalidAdapter,
            "at most 2000",
        ),
        ({**files_of(**dict.fromkeys(MANY, 1)), INDEX_FILE: b"{}"}, {}, InvalidAdapter, "300 files of weights"),
    ],
    ids=["no weights", "bin", "pt", "too large", "too large a pickle", "too many files"],
)
def test_what_may_not_be_fetched_is_not_fetched(make, files, settings, kind, says):
    source = FakeSource("one", {"sql": files})
    resolver = make(source, **settings)
    for _ in range(2):
        with pytest.raises(kind, match=says) as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert source.fetched == []
    assert resolver.kinds == [AdapterRejected] * 2


_LONG = {"max_rank": 2}
CONDEMNED = {
    "no JSON": (adapter_files() | {CONFIG_FILE: b"{"}, {}, {}),
    "QALoRA": (adapter_files(use_qalora=True), {}, {}),
    "rank": (adapter_files(), _LONG, {}),
    "another base model": (adapter_files(base_model_name_or_path="other/model"), {}, {"base_match": BaseMatch.STRICT}),
    "a server without LoRA": (adapter_files(), {"lora_enabled": False}, {}),
    "index": (sharded(adapter_files()) | {INDEX_FILE: b'{"adapter_model-00001-of-00002.safetensors"'}, {}, {}),
    "rank of a pickle": ({**files_of(**{PICKLE_FILES[0]: 9})}, _LONG, {"allow_pickle": True}),
}


@pytest.mark.parametrize(("files", "base", "settings"), CONDEMNED.values(), ids=CONDEMNED)
def test_what_its_configuration_condemns_brings_no_weights(make, tmp_path, files, base, settings):
    source = FakeSource("one", {"sql": files})
    resolver = make(source, **settings)
    resolver.base = replace(BASE, **base)
    with pytest.raises(LoRAPluginsError) as of_whole:
        verify_adapter(put(tmp_path / "whole", files), resolver.base, resolver.settings)
    for _ in range(2):
        with pytest.raises(type(of_whole.value)) as caught:
            resolver.ask()
        caught.value.adapter = ""
        assert str(caught.value) == str(of_whole.value)
    assert set(source.fetched_files) <= {CONFIG_FILE, INDEX_FILE}
    assert source.fetched == ["sql"], "refused for good"
    assert resolver.store.layout.digests() == []


def test_no_file_of_a_good_adapter_is_fetched_twice(make):
    files = sharded(adapter_files()) | CHAT
    source = FakeSource("one", {"sql": files})
    assert make(source).ask()
    assert sorted(source.fetched_files) == sorted(files)


def test_ranks_that_only_patterns_have_wait_for_the_weights(make):
    resolver = make(FakeSource("one", {"sql": adapter_files(rank_pattern={"no_module": 8})}))
    resolver.base = replace(BASE, max_rank=4)
    assert resolver.ask().rank == 4


def test_the_size_cap_counts_only_what_is_fetched(make):
    size_bytes = sum(map(len, adapter_files().values()))
    source = FakeSource("one", {"sql": {**adapter_files(), PICKLE_FILES[0]: b"x" * 99_999}})
    assert make(source, max_adapter_bytes=size_bytes).ask()
    with pytest.raises(InvalidAdapter, match=f"{size_bytes} bytes"):
        make(source, max_adapter_bytes=size_bytes - 1).ask()


def test_a_pickle_beside_safetensors_is_not_fetched(make):
    source = FakeSource("one", {"sql": {**dict.fromkeys(PICKLE_FILES, b"pickle"), **adapter_files()}})
    for allow in (False, True):
        resolved = make(source, allow_pickle=allow).ask()
        assert content(resolved.path) == adapter_files()
    assert sorted(source.fetched_files) == [CONFIG_FILE, WEIGHTS_FILE]


def test_of_two_allowed_pickles_one_is_fetched(make):
    source = FakeSource("one", {"sql": files_of(**dict.fromkeys(PICKLE_FILES, 9))})
    resolved = make(source, allow_pickle=True).ask()
    assert set(content(resolved.path)) == {CONFIG_FILE, PICKLE_FILES[0]}


def test_a_stored_pickle_is_refused_where_not_allowed(make):
    source = FakeSource("one", {"sql": files_of(**{PICKLE_FILES[0]: 9})})
    assert make(source, allow_pickle=True).ask()
    with pytest.raises(InvalidAdapter, match="LORA_PLUGINS_ALLOW_PICKLE"):
        make(source).ask()


# --- no room


def test_no_room_passes_through_and_is_not_remembered(make):
    source = FakeSource("one", {"sql": adapter_files(), "other": turned()})
    resolver = make(source, max_bytes=sum(map(len, adapter_files().values())) + 10)
    served = resolver.ask("sql")
    with pytest.raises(NoFreeSlot) as caught:
        resolver.ask("other")
    assert (caught.value.adapter, caught.value.http_status) == ("other", 503)
    assert source.fetched == ["sql"]
    assert resolver.kinds[-1] is AdapterRejected
    resolver.store.release("sql", served.path)
    assert resolver.ask("other")


def test_larger_than_the_store_passes_through_and_is_not_fetched(make):
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source, max_bytes=100)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_MAX_BYTES") as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert source.fetched == []


def test_eviction_from_the_store_is_reported(make):
    size_bytes = sum(map(len, adapter_files().values()))
    resolver = make(FakeSource("one", {"sql": adapter_files(), "chat": turned()}), max_bytes=size_bytes + 10)
    first = resolver.ask()
    resolver.store.release("sql", first.path)
    resolver.ask("chat")
    assert [event for event in resolver.emitted if isinstance(event, StoreEvicted)] == [
        StoreEvicted(first.path.name, size_bytes)
    ]


# --- what is remembered


def test_a_remote_sources_absence_is_believed_for_its_time(make, clock):
    remote, local = FakeSource("s3"), FakeSource("filesystem", remote=False)
    resolver = make(local, remote, absent_ttl_s=20)
    for _ in range(3):
        assert resolver.ask() is None
    assert (remote.asked, local.asked) == (["sql"], ["sql"] * 3)
    assert resolver.kinds == [AdapterUnknown, AbsenceRemembered, AdapterUnknown, AbsenceRemembered, AdapterUnknown]
    assert resolver.emitted[1] == AbsenceRemembered("sql", "s3")
    assert resolver.ask("other") is None
    assert remote.asked == ["sql", "other"]
    remote.answers["sql"] = adapter_files()
    clock.now_s += 19
    assert resolver.ask() is None
    clock.now_s += 2
    assert resolver.ask().source == "s3"


def test_an_absence_says_nothing_of_other_sources(make, clock):
    one, two = FakeSource("s3"), FakeSource("hub", {"sql": SourceUnavailable("x")})
    resolver = make(one, two)
    for _ in range(3):
        with pytest.raises(SourceUnavailable) as caught:
            resolver.ask()
        clock.now_s += caught.value.retry_after_s
    assert (one.asked, two.asked) == (["sql"], ["sql"] * 3)


def test_a_remote_source_is_not_asked_again_within_its_time(make, clock):
    source = FakeSource("s3", {"sql": adapter_files()})
    resolver = make(source, revalidate_s=20)
    first = resolver.ask()
    assert all(resolver.ask() is first for _ in range(3))
    clock.now_s += 19
    assert resolver.ask() is first
    assert (source.asked, source.fetched) == (["sql"], ["sql"])
    assert resolver.kinds == [AdapterFetched, AdapterResolved, *[AdapterConfirmed] * 4]
    clock.now_s += 21
    assert resolver.ask() == first
    assert resolver.emitted[-1] == AdapterConfirmed("sql", "s3")
    assert (source.asked, source.fetched) == (["sql"] * 2, ["sql"])
    source.answers["sql"] = turned()
    assert resolver.ask() == first
    clock.now_s += 21
    second = resolver.ask()
    assert second.path != first.path
    assert second.version != first.version
    assert content(second.path) == turned()
    assert content(first.path) == adapter_files()


def test_without_a_time_a_remote_source_is_asked_every_time(make):
    source = FakeSource("s3", {"sql": adapter_files()})
    resolver = make(source, revalidate_s=0.0, absent_ttl_s=0.0)
    assert resolver.ask() == resolver.ask()
    assert resolver.ask("other") is resolver.ask("other") is None
    assert (source.asked, source.fetched) == (["sql", "sql", "other", "other"], ["sql"])


def test_a_local_source_is_asked_every_time(make):
    source = FakeSource("filesystem", {"sql": adapter_files()}, remote=False)
    resolver = make(source)
    first = resolver.ask()
    assert resolver.ask() == first
    assert (source.asked, source.fetched) == (["sql"] * 2, ["sql"])
    assert resolver.kinds == [AdapterFetched, AdapterResolved, AdapterConfirmed]
    source.answers["sql"] = turned()
    assert content(resolver.ask().path) == turned()


@pytest.mark.parametrize("remote", [True, False])
def test_a_removed_store_directory_is_noticed_and_fetched_again(make, remote):
    source = FakeSource("one", {"sql": adapter_files()}, remote=remote)
    resolver = make(source)
    first = resolver.ask()
    shutil.rmtree(first.path)
    again = resolver.ask()
    assert again.path == first.path
    assert content(again.path) == adapter_files()
    assert source.fetched == ["sql"] * 2


@pytest.mark.parametrize("remote", [True, False])
def test_an_adapter_that_was_found_damaged_is_fetched_again(make, remote):
    source = FakeSource("one", {"sql": adapter_files()}, remote=remote)
    resolver = make(source)
    resolved = resolver.ask()
    damaged = resolved.path / WEIGHTS_FILE
    damaged.chmod(0o600)
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    assert not resolver.store.verify(resolved.path.name)
    assert content(resolver.ask().path) == adapter_files()
    assert source.fetched == ["sql"] * 2
    assert resolver.store.verify(resolved.path.name)


def test_memory_is_bounded(tmp_path, monkeypatch, clock):
    for module in (known_versions_module, search_module):
        monkeypatch.setattr(module, "_REMEMBERED_NAMES", 20)
    monkeypatch.setattr(known_versions_module, "_REMEMBERED_REJECTIONS", 10)
    served = {f"good-{number}": adapter_files() for number in range(30)}
    broken = {f"bad-{number}": BROKEN for number in range(30)}
    resolver = RecordingResolver(tmp_path / "store", FakeSource("s3", served | broken))

    async def flood() -> None:
        for start in range(0, 300, 100):
            names = [f"unknown-{number}" for number in range(start, start + 100)]
            await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in names))
        await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in served))
        results = await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in broken), return_exceptions=True)
        assert all(isinstance(result, InvalidAdapter) for result in results)

    asyncio.run(flood())
    known = resolver.known
    memories = (resolver._search._absent, known._last, known._places, known._had, known.refused)
    assert [len(memory) for memory in memories] == [20, 20, 20, 20, 10]


# --- whether there is one, before it is fetched


def test_what_was_found_is_not_looked_for_again(make):
    source = FakeSource("s3", {"sql": adapter_files()})
    resolver = make(source)
    assert asyncio.run(resolver.has("sql", BASE.path))
    assert (source.asked, source.fetched, resolver.emitted) == (["sql"], [], [])
    assert resolver.ask() is not None
    assert (source.asked, source.fetched) == (["sql"], ["sql"])
    assert asyncio.run(resolver.has("sql", BASE.path))
    assert source.asked == ["sql"], "believed for its time"


@pytest.mark.parametrize("answer", [None, SourceUnavailable("away"), InvalidAdapter("broken")])
def test_what_was_not_found_is_said_once(make, answer):
    source = FakeSource("s3", {"sql": answer} if answer else {})
    resolver = make(source)
    if answer is None:
        assert not asyncio.run(resolver.has("sql", BASE.path))
        assert resolver.ask() is None
    else:
        for ask in (lambda: asyncio.run(resolver.has("sql", BASE.path)), resolver.ask):
            with pytest.raises(type(answer)):
                ask()
    assert source.asked == (["sql"] * 2 if isinstance(answer, InvalidAdapter) else ["sql"])


# --- places for fetches


class HangingSource(FakeSource):
    """Fetches of names that begin with "hung" never end."""

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        if str(located.name).startswith("hung"):
            self.fetched.append(str(located.name))
            await asyncio.Event().wait()
        await super().fetch(located, arriving)


def hanging(resolver: RecordingResolver, source: HangingSource, count: int) -> list[asyncio.Task[object]]:
    source.answers |= {f"hung-{number}": adapter_files() for number in range(count)}
    return [asyncio.ensure_future(resolver.resolve(f"hung-{number}", BASE.path)) for number in range(count)]


def test_hung_fetches_stop_no_other_source_or_principal(make):
    source = HangingSource("s3", {"sql": adapter_files()})
    resolver = make(source, FakeSource("hub", {"chat": turned()}))

    async def run() -> None:
        resolver.principal = lambda: "team-a"
        tasks = hanging(resolver, source, 12)
        while len(source.fetched) < 4:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            assert (await resolver.resolve("chat", BASE.path)).source == "hub"
            resolver.principal = lambda: "team-b"
            assert (await resolver.resolve("sql", BASE.path)).source == "s3"
        for task in tasks:
            task.cancel()

    asyncio.run(run())
    assert len(source.fetched) == 5, "four that hang, and the one of the other principal"


# --- one flight for one name


def test_fifty_who_ask_at_once_share_one_answer(make):
    source = FakeSource("one", {"sql": adapter_files()}, remote=False)
    resolver = make(source)

    async def crowd() -> list[object]:
        return await asyncio.gather(*(resolver.resolve("sql", BASE.path) for _ in range(50)))

    answers = asyncio.run(crowd())
    assert answers[0].source == "one"
    assert all(answer is answers[0] for answer in answers)
    assert (source.asked, source.fetched) == (["sql"], ["sql"])
    assert resolver.kinds == [AdapterFetched, AdapterResolved]


@pytest.mark.parametrize("answer", [None, InvalidAdapter("x"), SourceUnavailable("x"), BROKEN])
def test_fifty_share_a_failure_too(make, answer):
    source = FakeSource("one", {"sql": answer} if answer else {})
    resolver = make(source)

    async def crowd() -> list[object]:
        asking = (resolver.resolve("sql", BASE.path) for _ in range(50))
        return await asyncio.gather(*asking, return_exceptions=True)

    answers = asyncio.run(crowd())
    kind = type(None) if answer is None else InvalidAdapter if answer is BROKEN else type(answer)
    assert {type(answer) for answer in answers} == {kind}
    assert source.asked == ["sql"]
    assert len(resolver.emitted) == 1


def test_a_cancelled_caller_does_not_cancel_the_fetch(make):
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source)

    async def crowd() -> list[object]:
        source.gate = asyncio.Event()
        waiting = [asyncio.create_task(resolver.resolve("sql", BASE.path)) for _ in range(5)]
        while not source.fetched:
            await asyncio.sleep(0.001)
        for task in waiting[:3]:  # the first of all among them, for whom the flight began
            task.cancel()
        await asyncio.sleep(0.01)
        source.gate.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = asyncio.run(crowd())
    assert [type(answer) for answer in answers[:3]] == [asyncio.CancelledError] * 3
    assert {answer.source for answer in answers[3:]} == {"one"}
    assert source.fetched == ["sql"]


async def ask_and_leave(resolver: AdapterResolver, source: FakeSource) -> None:
    """Ask for 'sql', give up while it is fetched, and let the fetch go on."""
    source.gate = asyncio.Event()
    asking = asyncio.create_task(resolver.resolve("sql", BASE.path))
    while not source.fetched:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait([asking])
    source.gate.set()


@pytest.mark.parametrize("joins", [False, True])
def test_a_version_that_nobody_awaits_is_said_to_be_abandoned(make, joins: bool) -> None:
    source = FakeSource("one", {"sql": adapter_files()})
    resolver = make(source)
    abandoned: list[object] = []
    resolver.on_abandoned = abandoned.append

    async def run() -> None:
        await ask_and_leave(resolver, source)
        if joins:
            await resolver.resolve("sql", BASE.path)
        while not (joins or abandoned):
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert (source.asked, source.fetched) == (["sql"], ["sql"])
    assert [(one.name, resolver.store.leases.is_held(one.digest, "sql")) for one in abandoned] == (
        [] if joins else [("sql", True)]
    )


def test_a_failure_that_nobody_awaits_is_reported(make, caplog):
    def fail() -> None:
        raise SourceUnavailable("broken off")

    source = FakeSource("one", {"sql": adapter_files()})
    source.while_fetching = fail
    resolver = make(source)

    async def run() -> None:
        await ask_and_leave(resolver, source)
        while not resolver.emitted:
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert resolver.kinds == [SourceFailed]
    assert "never retrieved" not in caplog.text


def test_different_names_do_not_wait_for_each_other(make):
    slow = FakeSource("s3", {"slow": adapter_files()})
    quick = FakeSource("hub", {"quick": turned()})
    resolver = make(slow, quick)

    async def both() -> str:
        slow.gate = asyncio.Event()
        waiting = asyncio.create_task(resolver.resolve("slow", BASE.path))
        while not slow.fetched:
            await asyncio.sleep(0.001)
        resolved = await resolver.resolve("quick", BASE.path)
        assert not waiting.done()
        slow.gate.set()
        await waiting
        return resolved.name

    assert asyncio.run(both()) == "quick"


# --- more unknown names than are looked up


class SlowSource(FakeSource):
    """Answers once the test lets it; `locating` is who waits for that."""

    def __init__(self, label: str, answers: Mapping[str, Files | Exception] | None = None) -> None:
        super().__init__(label, answers)
        self.answering: asyncio.Event | None = None
        self.locating: list[str] = []

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        if self.answering is not None:
            self.locating.append(str(name))
            await self.answering.wait()
        return await super().locate(name, base_model_name)


@pytest.fixture
def few(monkeypatch):
    """Two are looked up at once, and two more wait for a tenth of a second."""
    limits = LookUpLimits(at_once=2, waiting=2, wait_s=0.1)
    monkeypatch.setattr(search_module, "_LIMITS", limits)


async def flooded(resolver: AdapterResolver, source: SlowSource) -> list[asyncio.Task[object]]:
    """Ask for as many names as are looked up at once, and stay with them."""
    source.answering = asyncio.Event()
    flood = [asyncio.ensure_future(resolver.resolve(f"unknown-{number}", BASE.path)) for number in range(2)]
    while len(source.locating) < 2:
        await asyncio.sleep(0.001)
    return flood


def test_a_name_beyond_the_bound_is_no_404(make, few):
    source, later = SlowSource("s3"), FakeSource("hub", {"sql": adapter_files()})
    resolver = make(source, later)

    async def run() -> None:
        flood = await flooded(resolver, source)
        with pytest.raises(LookUpsBusy, match="adapter 'sql'") as caught:
            await resolver.resolve("sql", BASE.path)
        assert (caught.value.code, caught.value.http_status, caught.value.retry_after_s) == ("L006", 503, 2)
        assert resolver.emitted == [LookUpRefused("sql", "s3", caught.value)]
        assert later.asked == []  # which source has it is not for a flood to decide
        source.answering.set()
        assert await asyncio.gather(*flood) == [None, None]
        assert (await resolver.resolve("sql", BASE.path)).source == "hub"

    asyncio.run(run())


def test_a_known_name_is_looked_up_during_a_flood(make, few):
    source = SlowSource("s3", {"sql": adapter_files()})
    resolver = make(source, revalidate_s=0.0)

    async def run() -> None:
        await resolver.resolve("sql", BASE.path)
        flood = await flooded(resolver, source)
        asking = asyncio.ensure_future(resolver.resolve("sql", BASE.path))
        newest = asyncio.ensure_future(resolver.latest("sql", None, BASE.path))
        while source.locating.count("sql") < 2:
            await asyncio.sleep(0.001)
        source.answering.set()
        assert (await asking).name == (await newest).name == "sql"
        await asyncio.gather(*flood)

    asyncio.run(run())


def test_a_flood_at_one_source_leaves_others_alone(make, few):
    local, remote = FakeSource("filesystem", {"sql": adapter_files()}, remote=False), SlowSource("s3")
    resolver = make(local, remote)

    async def run() -> None:
        flood = await flooded(resolver, remote)
        assert (await resolver.resolve("sql", BASE.path)).source == "filesystem"
        remote.answering.set()
        await asyncio.gather(*flood)

    asyncio.run(run())


def test_a_directory_too_is_asked_for_few_unknown_names(make, monkeypatch):
    monkeypatch.setattr(search_module, "_LIMITS", LookUpLimits(at_once=2, absent_per_s=20.0))
    resolver = make(FakeSource("filesystem", remote=False))

    async def run() -> float:
        began = time.monotonic()
        await asyncio.gather(*(resolver.resolve(f"unknown-{number}", BASE.path) for number in range(10)))
        return time.monotonic() - began

    assert asyncio.run(run()) >= (10 - 2) / 20.0 * 0.9, "two at once, the others one after the other"


def test_an_absence_that_is_remembered_needs_no_turn(make, few):
    source = SlowSource("s3")
    resolver = make(source)

    async def run() -> None:
        assert await resolver.resolve("known-to-be-absent", BASE.path) is None
        flood = await flooded(resolver, source)
        assert await resolver.resolve("known-to-be-absent", BASE.path) is None
        source.answering.set()
        await asyncio.gather(*flood)

    asyncio.run(run())


# --- changed while it was being fetched


def changing(times: int) -> FakeSource:
    """A source whose adapter changes during the first `times` fetches."""
    source = FakeSource("one", {"sql": ranked(1)})

    def change() -> None:
        if len(source.fetched) <= times:
            source.answers["sql"] = ranked(1 + len(source.fetched))

    source.while_fetching = change
    return source


@pytest.mark.parametrize("times", [1, 2])
def test_an_adapter_that_changes_meanwhile_is_located_again(make, times):
    source = changing(times)
    resolver = make(source)
    assert content(resolver.ask().path) == ranked(1 + times)
    assert (len(source.asked), len(source.fetched)) == (times + 1, times + 1)
    assert resolver.kinds == [AdapterFetched, AdapterResolved]


def test_an_adapter_that_changes_three_times_is_unavailable(make):
    source = changing(99)
    resolver = make(source, FakeSource("two", {"sql": turned()}))
    with pytest.raises(SourceUnavailable) as caught:
        resolver.ask()
    assert (caught.value.code, caught.value.adapter) == ("L006", "sql")
    assert (len(source.asked), len(source.fetched)) == (3, 3)
    (event,) = resolver.emitted
    assert isinstance(event, SourceFailed)
    assert event.error is caught.value
    assert resolver.store.layout.digests() == []
    source.while_fetching = lambda: None
    assert resolver.ask().source == "one"


def test_an_adapter_that_vanishes_meanwhile_is_none(make):
    source = FakeSource("one", {"sql": adapter_files()})

    def vanish() -> None:
        source.answers.clear()
        raise VersionChanged("gone")

    source.while_fetching = vanish
    assert make(source).ask() is None


# --- with the real file system


def test_a_changed_directory_leaves_the_earlier_version_unchanged(tmp_path, make):
    root = tmp_path / "adapters"
    put(root / "sql", ranked(4))
    resolver = make(FilesystemSource(root))
    first = resolver.ask()
    assert resolver.ask() == first
    put(root / "sql", ranked(8))
    second = resolver.ask()
    assert (content(first.path), content(second.path)) == (ranked(4), ranked(8))
    put(root / "sql", BROKEN)
    with pytest.raises(InvalidAdapter):
        resolver.ask()
    put(root / "sql", ranked(4))
    assert resolver.ask().path == first.path
    shutil.rmtree(root / "sql")
    assert resolver.ask() is None


@pytest.mark.parametrize(
    ("file", "writer"), [("adapters.safetensors", "MLX's form"), ("lora.safetensors", "mistral-finetune's form")]
)
def test_a_directory_of_another_writer_is_answered_with_its_name(make, tmp_path, file, writer):
    """`adapters.safetensors` is what mlx_lm/tuner/trainer.py of mlx-lm (200af25d) saves, beside adapter_config.json."""
    put(tmp_path / "root" / "sql", {CONFIG_FILE: b"{}", file: b"x"})
    with pytest.raises(AdapterNotFound, match=f"no weights, but '{file}', which is of {writer}") as caught:
        make(FilesystemSource(tmp_path / "root")).ask()
    assert "merge it" in caught.value.remedy


def test_an_adapter_that_has_lost_a_layer_is_refused(make):
    """`target_modules` names q_proj and v_proj, which both layers of the model have."""
    tensors = {name: array for name, array in weights().items() if ".layers.1." not in name}
    resolver = make(FakeSource("one", {"sql": adapter_files(tensors)}))
    with pytest.raises(IncompatibleAdapter, match="no tensors for 1 modules that target_modules names") as caught:
        resolver.ask()
    assert "'model.layers.1.self_attn.q_proj'" in caught.value.found
    warned = make(FakeSource("one", {"sql": adapter_files(tensors)}), unmatched="warn").ask()
    assert warned is not None


def test_files_of_another_program_are_named_at_last(make, tmp_path):
    """A later source is asked first, and one that does not answer may have the adapter."""
    put(tmp_path / "root" / "sql", {"iter_500.pth": b"x"})
    folder, hub = FilesystemSource(tmp_path / "root"), FakeSource("hub", {"sql": adapter_files()})
    resolver = make(folder, hub)
    assert resolver.ask().source == "hub"
    hub.answers["sql"] = SourceUnavailable("no answer")
    with pytest.raises(SourceUnavailable):
        make(folder, hub).ask()
    resolver = make(folder, FakeSource("hub"))
    with pytest.raises(
        AdapterNotFound, match=r"sql.*adapter_config\.json.*'iter_500\.pth', which is of xtuner"
    ) as caught:
        resolver.ask()
    assert "pth_to_hf" in caught.value.remedy
    assert resolver.kinds == [AdapterUnknown]
