"""The resolver of sources: their order, outages, refusals, single flight, and that each version is fetched once."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
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
    LookUpRefused,
    SourceFailed,
    StoreEvicted,
)
from lora_plugins.resolvers import known_versions as known_versions_module
from lora_plugins.resolvers import search as search_module
from lora_plugins.resolvers import versions as versions_module
from lora_plugins.resolvers.admission import LookUpLimits, LookUpsBusy
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.resolvers.sources.remote_failures import Failure, FailureKind
from lora_plugins.resolvers.sources.source import RemoteAdapter, VersionChanged
from lora_plugins.settings import BaseMatch
from lora_plugins.store.partial_download import PartialDownload
from tests.make import BASE, CHAT, adapter_files, put, sharded
from tests.resolvers.fakes import BROKEN, GOOD, FakeSource, Files, RecordingResolver, failing
from tests.resolvers.sources.contract import content, ranked, turned


def warnings(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.levelno == logging.WARNING]


# --- found, or not


def test_a_found_adapter_is_fetched_verified_and_published(serving):
    source, resolver = serving("one", {"sql": GOOD})
    resolved = resolver.ask()
    (digest,) = resolver.store.layout.digests()
    path = resolver.store.layout.adapter(digest)
    assert (resolved.name, resolved.path, resolved.source) == ("sql", path, "one")
    assert resolved.version == asyncio.run(source.locate(AdapterName("sql"), "")).version
    assert content(path) == GOOD
    assert source.asked_for_base[0] == BASE.path
    fetched, event = resolver.emitted
    size_bytes = sum(map(len, GOOD.values()))
    assert isinstance(fetched, AdapterFetched)
    assert (fetched.name, fetched.source, fetched.uri, fetched.size_bytes) == ("sql", "one", "one://sql", size_bytes)
    assert isinstance(event, AdapterResolved)
    assert (event.name, event.source, event.path, event.rank) == ("sql", "one", str(path), 4)
    assert (event.size_bytes, event.fetched, event.uri) == (size_bytes, True, "one://sql")
    assert min(event.locate_s, event.obtain_s, event.check_s, fetched.fetch_s) >= 0


def test_sources_are_asked_in_order_and_the_first_wins(make):
    one, two = FakeSource("one"), FakeSource("two", {"sql": GOOD})
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


@pytest.mark.parametrize("name", ["", "../sql", "/sql", "sql/", "./sql", "a//b", "sql@", "a\0b", "a" * 257])
def test_a_malformed_name_asks_no_source(name, serving):
    source, resolver = serving("one", {name: GOOD})
    assert resolver.ask(name) is None
    (event,) = resolver.emitted
    assert not asyncio.run(resolver.has(name, BASE.path))
    assert asyncio.run(resolver.latest(name, None, BASE.path)) is None
    assert source.asked == []
    assert isinstance(event, AdapterUnknown)
    assert event.reason


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


def test_the_first_of_two_outages_is_raised_both_reported(make, logged):
    first, second = SourceUnavailable("one is away"), SourceUnavailable("two is away")
    resolver = make(FakeSource("one", {"sql": first}), FakeSource("two", {"sql": second}), FakeSource("three"))
    with pytest.raises(SourceUnavailable) as caught:
        resolver.ask()
    assert caught.value is first
    assert caught.value.adapter == "sql"
    assert resolver.sources[2].asked == ["sql"]
    assert len(warnings(logged)) == 2


def test_an_outage_is_remembered_for_its_retry_after(serving, clock):
    """Of that name: the others are asked for, and so is what a refresh wants to know."""
    source, resolver = serving("one", {"sql": SourceUnavailable("no answer"), "chat": GOOD})
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="no answer") as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert (source.asked, resolver.kinds) == (["sql"], [SourceFailed])
    assert resolver.ask("chat").source == "one"
    source.answers["sql"] = GOOD
    clock.now_s += caught.value.retry_after_s - 0.1
    with pytest.raises(SourceUnavailable):
        resolver.ask()
    clock.now_s += 0.2
    assert resolver.ask().source == "one"


def test_a_refresh_asks_past_a_remembered_outage(serving):
    source, resolver = serving("one", {"sql": SourceUnavailable("no answer")})
    with pytest.raises(SourceUnavailable):
        resolver.ask()
    source.answers["sql"] = GOOD
    assert asyncio.run(resolver.latest("sql", None, BASE.path)).source == "one"
    assert resolver.ask().source == "one", "and what it has found is believed"


# --- adapters that are refused


@pytest.mark.parametrize("answer", [InvalidAdapter("x"), AdapterNotFound("x"), IncompatibleAdapter("x"), BROKEN])
def test_a_source_that_has_it_broken_ends_the_search(answer, make):
    later = FakeSource("two", {"sql": GOOD})
    resolver = make(FakeSource("one", {"sql": answer}), later)
    with pytest.raises(InvalidAdapter if answer is BROKEN else type(answer), match="adapter 'sql'") as caught:
        resolver.ask()
    assert caught.value.file == (CONFIG_FILE if answer is BROKEN else "")
    assert later.asked == []
    (event,) = resolver.emitted
    assert isinstance(event, AdapterRejected)
    assert (event.name, event.source, event.error) == ("sql", "one", caught.value)
    assert resolver.store.layout.digests() == []


def test_only_a_changed_version_is_fetched_again_after_a_refusal(serving):
    source, resolver = serving("one", {"sql": BROKEN})
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
    source.answers["sql"] = GOOD
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
    ("error", "kind"),
    [
        (InvalidAdapter("a pipe"), AdapterRejected),
        (OutOfMemory("a full disk"), AdapterRejected),
        (SourceUnavailable("broken off"), SourceFailed),
        (OSError(28, "full"), AdapterRejected),
    ],
)
def test_a_failed_fetch_is_reported_and_refuses_no_version(make, clock, error, kind):
    source, later = FakeSource("one", {"sql": GOOD}), FakeSource("two", {"sql": turned()})
    source.while_fetching = failing(error)
    resolver = make(source, later)
    with pytest.raises(LoRAPluginsError) as caught:
        resolver.ask()
    assert (caught.value.adapter, resolver.kinds) == ("sql", [kind])
    clock.now_s += 5
    source.while_fetching = lambda: None
    assert resolver.ask().source == "one"


def test_a_lease_that_another_name_needs_stays(make):
    # The same bytes served as one name and then, against a base that has become known, refused as another.
    resolver = make(FakeSource("one", dict.fromkeys(("sql", "other"), GOOD)))
    path = resolver.ask("sql").path
    resolver.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        resolver.ask("other")
    assert not resolver.store.remove(path.name)


def test_the_base_path_stands_in_for_the_base_model(serving):
    source, resolver = serving("one", {"sql": GOOD})
    resolver.base = None
    assert resolver.ask()
    source.answers["other"] = adapter_files(base_model_name_or_path="other/model")
    with pytest.raises(IncompatibleAdapter, match=BASE.path):
        resolver.ask("other")


def test_verification_runs_in_a_thread(make, monkeypatch):
    resolver = make(FakeSource("one", {"sql": GOOD}))
    check, threads = versions_module.fit_adapter, []

    def recorded(*arguments):
        threads.append(threading.current_thread())
        return check(*arguments)

    monkeypatch.setattr(versions_module, "fit_adapter", recorded)
    assert resolver.ask()
    assert threading.main_thread() not in threads
    assert len(threads) == 1


def test_what_the_store_has_is_compared_with_the_model(make, readings):
    answers = {name: adapter_files(base_model_name_or_path="other/model") for name in ("sql", "same")}
    resolver = make(FakeSource("one", answers))
    assert resolver.ask("sql").path == resolver.ask("same").path
    strict = make(FakeSource("one", answers), base_match=BaseMatch.STRICT)  # as after a restart
    for name in answers:
        with pytest.raises(IncompatibleAdapter, match=BASE.path):
            strict.ask(name)
    assert len(readings.of_weights) == 4


# --- what may be fetched: by names and sizes, before the first byte


def files_of(**sizes: int) -> dict[str, bytes]:
    return {CONFIG_FILE: GOOD[CONFIG_FILE], **{name: b"x" * size for name, size in sizes.items()}}


MANY = [f"adapter_model-{number:05}-of-00300.safetensors" for number in range(300)]


@pytest.mark.parametrize(
    ("files", "settings", "kind", "says"),
    [
        (files_of(), {}, AdapterNotFound, "the adapter's weights"),
        (files_of(**{PICKLE_FILES[0]: 9}), {}, InvalidAdapter, "LORA_PLUGINS_ALLOW_PICKLE"),
        (files_of(**{PICKLE_FILES[1]: 9}), {}, InvalidAdapter, "LORA_PLUGINS_ALLOW_PICKLE"),
        (GOOD, {"max_adapter_bytes": 2000}, InvalidAdapter, "LORA_PLUGINS_MAX_ADAPTER_BYTES"),
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
def test_what_may_not_be_fetched_is_not_fetched(serving, files, settings, kind, says):
    source, resolver = serving("one", {"sql": files}, **settings)
    for _ in range(2):
        with pytest.raises(kind, match=says) as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert source.fetched == []
    assert resolver.kinds == [AdapterRejected] * 2


_LONG = {"max_rank": 2}
CONDEMNED = {
    "no JSON": (GOOD | {CONFIG_FILE: b"{"}, {}, {}),
    "QALoRA": (adapter_files(use_qalora=True), {}, {}),
    "rank": (GOOD, _LONG, {}),
    "another base model": (adapter_files(base_model_name_or_path="other/model"), {}, {"base_match": BaseMatch.STRICT}),
    "a server without LoRA": (GOOD, {"lora_enabled": False}, {}),
    "index": (sharded(GOOD) | {INDEX_FILE: b'{"adapter_model-00001-of-00002.safetensors"'}, {}, {}),
    "rank of a pickle": ({**files_of(**{PICKLE_FILES[0]: 9})}, _LONG, {"allow_pickle": True}),
}


@pytest.mark.parametrize(("files", "base", "settings"), CONDEMNED.values(), ids=CONDEMNED)
def test_what_its_configuration_condemns_brings_no_weights(serving, tmp_path, files, base, settings):
    source, resolver = serving("one", {"sql": files}, **settings)
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
    files = sharded(GOOD) | CHAT
    source = FakeSource("one", {"sql": files})
    assert make(source).ask()
    assert sorted(source.fetched_files) == sorted(files)


def test_ranks_that_only_patterns_have_wait_for_the_weights(make):
    resolver = make(FakeSource("one", {"sql": adapter_files(rank_pattern={"no_module": 8})}))
    resolver.base = replace(BASE, max_rank=4)
    assert resolver.ask().rank == 4


def test_the_size_cap_counts_only_what_is_fetched(make):
    size_bytes = sum(map(len, GOOD.values()))
    source = FakeSource("one", {"sql": {**GOOD, PICKLE_FILES[0]: b"x" * 99_999}})
    assert make(source, max_adapter_bytes=size_bytes).ask()
    with pytest.raises(InvalidAdapter, match=f"{size_bytes} bytes"):
        make(source, max_adapter_bytes=size_bytes - 1).ask()


def test_a_pickle_beside_safetensors_is_not_fetched(make):
    source = FakeSource("one", {"sql": {**dict.fromkeys(PICKLE_FILES, b"pickle"), **GOOD}})
    for allow in (False, True):
        resolved = make(source, allow_pickle=allow).ask()
        assert content(resolved.path) == GOOD
    assert sorted(source.fetched_files) == [CONFIG_FILE, WEIGHTS_FILE]


def test_of_two_allowed_pickles_one_is_fetched(make):
    source = FakeSource("one", {"sql": files_of(**dict.fromkeys(PICKLE_FILES, 9))})
    resolved = make(source, allow_pickle=True).ask()
    assert set(content(resolved.path)) == {CONFIG_FILE, PICKLE_FILES[0]}


def test_a_stored_pickle_is_refused_where_not_allowed(make):
    source = FakeSource("one", {"sql": files_of(**{PICKLE_FILES[0]: 9})})
    digest, strict = make(source, allow_pickle=True).ask().digest, make(source)
    for ask in (strict.ask, lambda: asyncio.run(strict.of_digest("sql", digest, of_any_name=True))):
        with pytest.raises(InvalidAdapter, match="LORA_PLUGINS_ALLOW_PICKLE"):
            ask()


# --- no room


def test_no_room_passes_through_and_is_not_remembered(make):
    source = FakeSource("one", {"sql": GOOD, "other": turned()})
    resolver = make(source, max_bytes=sum(map(len, GOOD.values())) + 10)
    served = resolver.ask("sql")
    with pytest.raises(NoFreeSlot) as caught:
        resolver.ask("other")
    assert (caught.value.adapter, caught.value.http_status) == ("other", 503)
    assert source.fetched == ["sql"]
    assert resolver.kinds[-1] is AdapterRejected
    resolver.store.release("sql", served.path)
    assert resolver.ask("other")


def test_larger_than_the_store_passes_through_and_is_not_fetched(serving):
    source, resolver = serving("one", {"sql": GOOD}, max_bytes=100)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="LORA_PLUGINS_STORE_MAX_BYTES") as caught:
            resolver.ask()
        assert caught.value.adapter == "sql"
    assert source.fetched == []


def test_eviction_from_the_store_is_reported(make):
    size_bytes = sum(map(len, GOOD.values()))
    resolver = make(FakeSource("one", {"sql": GOOD, "chat": turned()}), max_bytes=size_bytes + 10)
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
    remote.answers["sql"] = GOOD
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


def test_a_remote_source_is_not_asked_again_within_its_time(serving, clock):
    source, resolver = serving("s3", {"sql": GOOD}, revalidate_s=20)
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
    assert content(first.path) == GOOD


def test_without_a_time_a_remote_source_is_asked_every_time(serving):
    source, resolver = serving("s3", {"sql": GOOD}, revalidate_s=0.0, absent_ttl_s=0.0)
    assert resolver.ask() == resolver.ask()
    assert resolver.ask("other") is resolver.ask("other") is None
    assert (source.asked, source.fetched) == (["sql", "sql", "other", "other"], ["sql"])


def test_a_local_source_is_asked_every_time(serving):
    source, resolver = serving("filesystem", {"sql": GOOD}, remote=False)
    first = resolver.ask()
    assert resolver.ask() == first
    assert (source.asked, source.fetched) == (["sql"] * 2, ["sql"])
    assert resolver.kinds == [AdapterFetched, AdapterResolved, AdapterConfirmed]
    source.answers["sql"] = turned()
    assert content(resolver.ask().path) == turned()


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("is_gone", [True, False], ids=["removed", "damaged"])
def test_a_lost_or_damaged_copy_is_fetched_again(serving, remote, is_gone):
    source, resolver = serving("one", {"sql": GOOD}, remote=remote)
    first = resolver.ask()
    if is_gone:
        shutil.rmtree(first.path)
    else:
        (first.path / WEIGHTS_FILE).chmod(0o600)
        (first.path / WEIGHTS_FILE).write_bytes(b"x" * len(GOOD[WEIGHTS_FILE]))
        assert not resolver.store.verify(first.digest)
    again = resolver.ask()
    assert again.path == first.path
    assert content(again.path) == GOOD
    assert source.fetched == ["sql"] * 2
    assert resolver.store.verify(first.digest)


def test_memory_is_bounded(tmp_path, monkeypatch, clock):
    for module in (known_versions_module, search_module):
        monkeypatch.setattr(module, "_REMEMBERED_NAMES", 20)
    monkeypatch.setattr(known_versions_module, "_REMEMBERED_REJECTIONS", 10)
    served = {f"good-{number}": GOOD for number in range(22)}
    broken = {f"bad-{number}": BROKEN for number in range(12)}
    resolver = RecordingResolver(tmp_path / "store", FakeSource("s3", served | broken))

    async def flood() -> None:
        await asyncio.gather(*(resolver.resolve(f"unknown-{number}", BASE.path) for number in range(60)))
        await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in served))
        results = await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in broken), return_exceptions=True)
        assert all(isinstance(result, InvalidAdapter) for result in results)

    asyncio.run(flood())
    known = resolver.known
    memories = (resolver._search._absent, known._last, known._places, known._had, known.refused)
    assert [len(memory) for memory in memories] == [20, 20, 20, 20, 10]


# --- whether there is one, before it is fetched


def test_what_was_found_is_not_looked_for_again(serving):
    source, resolver = serving("s3", {"sql": GOOD})
    assert asyncio.run(resolver.has("sql", BASE.path))
    assert (source.asked, source.fetched, resolver.emitted) == (["sql"], [], [])
    assert resolver.ask() is not None
    assert (source.asked, source.fetched) == (["sql"], ["sql"])
    assert asyncio.run(resolver.has("sql", BASE.path))
    assert source.asked == ["sql"], "believed for its time"


@pytest.mark.parametrize("answer", [None, SourceUnavailable("away"), InvalidAdapter("broken")])
def test_what_was_not_found_is_said_once(serving, answer):
    source, resolver = serving("s3", {"sql": answer} if answer else {})
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
    source.answers |= {f"hung-{number}": GOOD for number in range(count)}
    return [asyncio.ensure_future(resolver.resolve(f"hung-{number}", BASE.path)) for number in range(count)]


def test_hung_fetches_stop_no_other_source_or_principal(make):
    source = HangingSource("s3", {"sql": GOOD})
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


@pytest.mark.parametrize("answer", [GOOD, None, InvalidAdapter("x"), SourceUnavailable("x"), BROKEN])
def test_fifty_who_ask_at_once_share_one_answer(serving, answer):
    source, resolver = serving("one", {"sql": answer} if answer else {}, remote=answer is not GOOD)

    async def crowd() -> list[object]:
        asking = (resolver.resolve("sql", BASE.path) for _ in range(50))
        return await asyncio.gather(*asking, return_exceptions=True)

    answers = asyncio.run(crowd())
    if answer is GOOD:
        assert all(one is answers[0] for one in answers)
        assert resolver.kinds == [AdapterFetched, AdapterResolved]
    else:
        kind = type(None) if answer is None else InvalidAdapter if answer is BROKEN else type(answer)
        assert {type(one) for one in answers} == {kind}
        assert len(resolver.emitted) == 1
    assert source.asked == ["sql"]
    assert source.fetched == (["sql"] if answer in (GOOD, BROKEN) else [])


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
def test_a_version_that_nobody_awaits_is_said_to_be_abandoned(serving, joins: bool) -> None:
    source, resolver = serving("one", {"sql": GOOD})
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
    source = FakeSource("one", {"sql": GOOD})
    source.while_fetching = failing(SourceUnavailable("broken off"))
    resolver = make(source)

    async def run() -> None:
        await ask_and_leave(resolver, source)
        while not resolver.emitted:
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert resolver.kinds == [SourceFailed]
    assert "never retrieved" not in caplog.text


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
    source, later = SlowSource("s3"), FakeSource("hub", {"sql": GOOD})
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


def test_a_directory_too_is_asked_for_few_unknown_names(make, monkeypatch):
    monkeypatch.setattr(search_module, "_LIMITS", LookUpLimits(at_once=2, absent_per_s=20.0))
    resolver = make(FakeSource("filesystem", remote=False))

    async def run() -> float:
        began = time.monotonic()
        await asyncio.gather(*(resolver.resolve(f"unknown-{number}", BASE.path) for number in range(10)))
        return time.monotonic() - began

    assert asyncio.run(run()) >= (10 - 2) / 20.0 * 0.9, "two at once, the others one after the other"


def test_known_names_absences_and_other_sources_need_no_turn(make, few):
    local, source = FakeSource("filesystem", {"here": GOOD}, remote=False), SlowSource("s3", {"sql": GOOD})
    resolver = make(local, source, revalidate_s=0.0)

    async def run() -> None:
        await resolver.resolve("sql", BASE.path)
        assert await resolver.resolve("known-to-be-absent", BASE.path) is None
        flood = await flooded(resolver, source)
        assert (await resolver.resolve("here", BASE.path)).source == "filesystem"
        assert await resolver.resolve("known-to-be-absent", BASE.path) is None
        asking = asyncio.ensure_future(resolver.resolve("sql", BASE.path))
        newest = asyncio.ensure_future(resolver.latest("sql", None, BASE.path))
        while source.locating.count("sql") < 2:
            await asyncio.sleep(0.001)
        source.answering.set()
        assert (await asking).name == (await newest).name == "sql"
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
    source = FakeSource("one", {"sql": GOOD})

    def vanish() -> None:
        source.answers.clear()
        raise VersionChanged("gone")

    source.while_fetching = vanish
    assert make(source).ask() is None


# --- with the real file system


@pytest.mark.parametrize(
    ("file", "writer"), [("adapters.safetensors", "MLX's form"), ("lora.safetensors", "mistral-finetune's form")]
)
def test_a_directory_of_another_writer_is_answered_with_its_name(make, tmp_path, file, writer):
    """`adapters.safetensors` is what mlx_lm/tuner/trainer.py of mlx-lm (200af25d) saves, beside adapter_config.json."""
    put(tmp_path / "root" / "sql", {CONFIG_FILE: b"{}", file: b"x"})
    with pytest.raises(AdapterNotFound, match=f"no weights, but '{file}', which is of {writer}") as caught:
        make(FilesystemSource(tmp_path / "root")).ask()
    assert "merge it" in caught.value.remedy


def test_files_of_another_program_are_named_at_last(make, tmp_path):
    """A later source is asked first, and one that does not answer may have the adapter."""
    put(tmp_path / "root" / "sql", {"iter_500.pth": b"x"})
    folder, hub = FilesystemSource(tmp_path / "root"), FakeSource("hub", {"sql": GOOD})
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
