"""Versions of names: refreshed, leased while a name needs them, found again by digest."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.adapter.chat import MAX_BYTES, TOKENIZER_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import (
    ErrorKind,
    IncompatibleAdapter,
    InvalidAdapter,
    OutOfMemory,
    SourceUnavailable,
    kind_of,
)
from lora_plugins.events import AdapterConfirmed, AdapterResolved
from lora_plugins.resolvers import admission
from lora_plugins.resolvers import versions as versions_module
from lora_plugins.resolvers.admission import FetchesBusy
from lora_plugins.resolvers.sources.pushed import PushedAdapter
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import AdapterChat
from lora_plugins.store.layout import replace_small
from lora_plugins.store.leases import Leases
from lora_plugins.store.manifest import Manifest, digest_of
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.verification import reading_process as process_module
from lora_plugins.verification.children import Children
from tests.make import BASE, CHAT, adapter_files, put, safetensors, weights
from tests.resolvers import fakes
from tests.resolvers.fakes import GOOD, FakeSource, RecordingResolver, failing
from tests.resolvers.sources.contract import content, turned
from tests.verification.conftest import program


def newest(resolver: RecordingResolver, name: str = "sql"):
    return asyncio.run(resolver.latest(name, None, BASE.path))


def of_digest(resolver: RecordingResolver, name: str, prefix: str, **more: bool):
    return asyncio.run(resolver.of_digest(name, prefix, **more))


def push(resolver: RecordingResolver, directory: Path, files: dict[str, bytes]):
    put(directory, files)
    return asyncio.run(resolver.pushed(PushedAdapter.of("policy", directory, directory.name), BASE.path))


# --- the newest version


class SlowToEnd(FakeSource):
    """Has all bytes of a fetch, and ends the fetch later."""

    async def fetch(self, located, arriving) -> None:
        end, self.gate = self.gate, None
        await super().fetch(located, arriving)
        if end is not None:
            await end.wait()


def test_a_refresh_asks_again_although_a_cancelled_one_still_fetches(make):
    source = SlowToEnd("s3", {"sql": GOOD})
    resolver = make(source)

    async def run() -> None:
        source.gate = end = asyncio.Event()
        first = asyncio.create_task(resolver.latest("sql", None, BASE.path))
        while not source.fetched_files:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        source.answers["sql"] = turned()
        second = asyncio.create_task(resolver.latest("sql", None, BASE.path))
        await asyncio.sleep(0.05)
        end.set()
        assert content((await second).path) == turned()

    asyncio.run(run())


def test_a_refresh_asks_the_source_whatever_it_answered_before(serving):
    source, resolver = serving("s3")
    assert resolver.ask() is None
    source.answers["sql"] = GOOD
    assert resolver.ask() is None, "believed for its time"
    first = newest(resolver)
    assert content(first.path) == GOOD
    assert resolver.ask() is first
    source.answers["sql"] = turned()
    assert resolver.ask() is first, "not asked again within its time"
    second = newest(resolver)
    assert content(second.path) == turned()
    assert resolver.ask() is second
    del source.answers["sql"]
    assert newest(resolver) is None
    assert resolver.ask() is None
    assert content(second.path) == turned()


def test_a_version_that_has_not_changed_is_only_confirmed(make):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    first = resolver.ask()
    emitted = list(resolver.emitted)
    assert newest(resolver) is first
    assert resolver.emitted == [*emitted, AdapterConfirmed("sql", "s3")]


@pytest.mark.parametrize("away", ["one", "two"])
def test_only_the_origins_outage_hides_a_new_version(make, away):
    """No later source stands in for the origin, and an earlier source may be away."""
    sources = {label: FakeSource(label, {"sql": GOOD}) for label in ("one", "two")}
    if away == "one":
        sources["one"].answers["sql"] = SourceUnavailable("away")
    resolver = make(*sources.values())
    first = resolver.ask()
    sources["two"].answers["sql"] = turned()
    if away == "one":
        assert content(newest(resolver).path) == turned()
        return
    sources["one"].answers["sql"] = SourceUnavailable("away")
    with pytest.raises(SourceUnavailable, match="away"):
        newest(resolver)
    assert content(first.path) == GOOD


def test_refreshes_share_a_fetch_but_no_earlier_answer(serving):
    source, resolver = serving("s3", {"sql": GOOD})

    async def run() -> None:
        source.gate = asyncio.Event()
        early = asyncio.create_task(resolver.resolve("sql", BASE.path))
        while not source.fetched:
            await asyncio.sleep(0.001)
        refreshes = [asyncio.create_task(resolver.latest("sql", None, BASE.path)) for _ in range(5)]
        await asyncio.sleep(0.01)
        source.gate.set()
        assert len({each.digest for each in await asyncio.gather(early, *refreshes)}) == 1

    asyncio.run(run())
    assert source.asked == ["sql"] * 6
    assert source.fetched == ["sql"]


# --- leases


def leased(resolver: RecordingResolver, resolved) -> bool:
    return bool(resolver.store.leases.holders(resolved.digest))


@pytest.mark.parametrize("remote", [True, False])
def test_a_version_is_leased_until_its_name_is_released(serving, remote):
    source, resolver = serving("one", {"sql": GOOD}, remote=remote)
    resolved = resolver.ask()
    resolver.store.release("other", resolved.path)
    resolver.store.release("sql", resolved.path.with_name("0" * 64))
    assert leased(resolver, resolved)
    resolver.store.release("sql", str(resolved.path))
    assert not leased(resolver, resolved)
    assert resolver.ask() == resolved
    assert leased(resolver, resolved)
    assert source.fetched == ["sql"]


def test_one_name_releases_nothing_that_another_is_verifying(make, monkeypatch):
    resolver = make(FakeSource("s3", {"sql": GOOD, "other": GOOD}))
    first = resolver.ask("sql")
    check = versions_module.fit_adapter

    def release_meanwhile(*arguments):
        verified = check(*arguments)
        resolver.store.release("sql", first.path)
        assert not resolver.store.remove(first.digest)
        return verified

    monkeypatch.setattr(versions_module, "fit_adapter", release_meanwhile)
    second = resolver.ask("other")
    assert second.path == first.path
    assert leased(resolver, second)
    resolver.store.release("other", second.path)
    assert not leased(resolver, second)


def test_a_new_version_that_does_not_fit_is_not_leased(serving):
    source, resolver = serving("s3", {"sql": GOOD})
    first = resolver.ask()
    source.answers["sql"] = adapter_files(rank_pattern={"no_module": 8})  # so weights decide
    resolver.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter):
        newest(resolver)
    (other,) = set(resolver.store.layout.digests()) - {first.digest}
    assert leased(resolver, first)
    assert resolver.store.remove(other)


# --- by digest


def test_an_earlier_version_is_found_by_its_digest_without_asking(serving):
    source, resolver = serving("s3", {"sql": GOOD})
    first = resolver.ask()
    source.answers["sql"] = turned()
    second = newest(resolver)
    resolver.store.release("sql", first.path)
    asked = len(source.asked)
    for prefix in (first.digest, first.digest[:12], first.digest[:8]):
        found = of_digest(resolver, "sql", prefix)
        assert (found.name, found.path, found.version, found.uri) == ("sql", first.path, first.version, first.uri)
        assert (found.adapter_id, found.rank, found.size_bytes) == (first.adapter_id, 4, first.size_bytes)
        assert leased(resolver, first)
    assert of_digest(resolver, "sql", second.digest).path == second.path
    assert len(source.asked) == asked


def test_bytes_that_another_name_brought_are_found_by_digest_too(serving):
    """A canary and the name that it became have the same bytes, which the store keeps once, from the first place."""
    _, resolver = serving("s3", {"canary": GOOD, "sql": GOOD, "other": turned()})
    canary, sql = resolver.ask("canary"), resolver.ask("sql")
    resolver.ask("other")
    assert canary.digest == sql.digest
    found = of_digest(resolver, "sql", sql.digest[:8])
    assert (found.name, found.path, found.uri, found.version) == ("sql", sql.path, sql.uri, sql.version)
    assert of_digest(resolver, "other", sql.digest) is None, "no version of this name"


def test_a_version_by_its_whole_digest_is_the_names(make, tmp_path):
    """A rollback, a declared digest, and what a restart restores."""
    resolver = make(FakeSource("s3", {"sql": GOOD, "theirs": turned()}))
    resolver.ask("sql")  # the pushed bytes are there already, so the store knows another place
    pushed, newer = (push(resolver, tmp_path / str(it), files) for it, files in enumerate((GOOD, turned())))
    theirs = resolver.ask("theirs")
    restarted = make()
    assert of_digest(restarted, "policy", pushed.digest) is None
    assert of_digest(restarted, "policy", pushed.digest, of_any_name=True).path == pushed.path
    assert of_digest(restarted, "policy", pushed.digest[:8]).path == pushed.path
    assert of_digest(restarted, "policy", newer.digest[:8]).path == newer.path, "of earlier pushes too"
    assert of_digest(restarted, "sql", theirs.digest, of_any_name=True).path == theirs.path
    assert of_digest(restarted, "sql", theirs.digest[:8]).path == theirs.path
    assert of_digest(restarted, "sql", pushed.digest) is None, "their other versions stay theirs"


def test_a_short_unknown_or_empty_prefix_finds_nothing(make):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    digest = resolver.ask().digest
    other = "0" if digest[0] != "0" else "1"
    for prefix in ("", digest[:7], other * 8, digest + "0", digest.upper(), "*" * 8):
        assert of_digest(resolver, "sql", prefix) is None, prefix


def test_a_name_that_was_never_found_has_no_store_read(make, monkeypatch):
    """Whoever asks for `x@deadbeef` again and again would have a store of 50,000 entries listed each time."""
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    digest, read = resolver.ask().digest, []
    monkeypatch.setattr(resolver.store.published, "matching", lambda prefix: read.append(prefix) or [])
    assert of_digest(resolver, "x", digest[:8]) is None
    assert read == []
    assert of_digest(resolver, "sql", digest[:8]) is None
    assert read == [digest[:8]]


def test_two_versions_of_one_prefix_are_none(serving, monkeypatch):
    source, resolver = serving("s3", {"sql": GOOD})
    resolver.ask()
    source.answers["sql"] = turned()
    newest(resolver)
    monkeypatch.setattr("lora_plugins.adapter.names.MIN_PREFIX", 0)
    assert of_digest(resolver, "sql", "") is None


def test_a_name_does_not_reach_versions_of_another(make):
    resolver = make(FakeSource("s3", {"mine": GOOD, "theirs": turned()}))
    resolver.ask("mine")
    theirs = resolver.ask("theirs")
    assert of_digest(resolver, "mine", theirs.digest) is None
    assert of_digest(resolver, "unheard-of", theirs.digest) is None
    assert of_digest(resolver, "mine", theirs.digest, of_any_name=True).path == theirs.path
    for prefix in (theirs.digest[:8], theirs.digest[:63]):
        assert of_digest(resolver, "mine", prefix, of_any_name=True) is None


def test_a_store_that_is_gone_is_unavailable_and_comes_back(make):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    first = resolver.ask()
    away = resolver.store.layout.root.with_name("away")
    resolver.store.layout.root.rename(away)
    for ask in (lambda: of_digest(resolver, "sql", first.digest), lambda: newest(resolver)):
        with pytest.raises(SourceUnavailable, match="No such file or directory"):
            ask()
    with pytest.raises(FileNotFoundError):
        replace_small(resolver.store.layout.folder("served") / "of-a-model.json", "{}")
    assert not resolver.store.layout.root.exists(), "nothing is in the way of the one that comes back"
    away.rename(resolver.store.layout.root)
    assert of_digest(resolver, "sql", first.digest).path == first.path
    assert newest(resolver) is first


def test_a_version_by_digest_is_validated_against_the_base_model(make):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    first = resolver.ask()
    resolver.store.release("sql", first.path)
    resolver.base = replace(BASE, max_rank=1)
    with pytest.raises(IncompatibleAdapter, match="'sql'"):
        of_digest(resolver, "sql", first.digest)
    assert not leased(resolver, first)


def test_a_damaged_version_is_not_found(make):
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    first = resolver.ask()
    (first.path / "manifest.json").chmod(0o600)
    (first.path / "manifest.json").write_text("{")
    assert of_digest(resolver, "sql", first.digest) is None


@pytest.mark.parametrize("call", ["push", "by digest", "restore"])
@pytest.mark.parametrize("delay_s", [None, 0.0, 0.01])
def test_a_call_cancelled_in_any_await_leaves_no_lease(serving, tmp_path, monkeypatch, call, delay_s):
    source, resolver = serving("s3", {"sql": GOOD})
    resolver.on_abandoned = lambda version: resolver.store.release(version.name, version.path)
    version, acquire = resolver.ask(), Leases.acquire
    directory = put(tmp_path / "pushed", GOOD)

    def slowly(*given):
        time.sleep(0.03)  # a cancellation meets the thread in the midst
        return acquire(*given)

    def begin():
        if call == "push":
            return resolver.pushed(PushedAdapter.of("policy", directory, "1"), BASE.path)
        if call == "restore":
            return resolver.restored("sql", None, version.digest, str(source))
        return resolver.of_digest("sql", version.digest)

    async def run() -> None:
        for last in range(1, 50):
            await ended(*(resolver.store.release(name, version.path) for name in ("sql", "policy")))
            asking = asyncio.create_task(cancelled_at(begin(), last, delay_s))
            await asyncio.wait([asking])
            if not asking.cancelled():
                return
            await asyncio.sleep(0.1)  # for the lease of a thread that has begun
            deadline = time.monotonic() + 2
            while resolver.store.leases.is_ours(version.digest):
                assert time.monotonic() < deadline, f"the lease is left after await {last}"
                await asyncio.sleep(0.01)

    monkeypatch.setattr(Leases, "acquire", slowly)
    asyncio.run(run())


async def ended(*releases) -> None:
    await asyncio.gather(*(release for release in releases if release is not None))


@types.coroutine
def cancelled_at(work, last: int, delay_s: float | None):
    """Run `work`, cancelled in its await number `last`, so many seconds after its begin; None: as it begins."""
    task, count = asyncio.current_task(), 0
    answer = functools.partial(work.send, None)
    while True:
        try:
            awaited = answer()
        except StopIteration as end:
            return end.value
        count += 1
        if count == last and delay_s is None:
            task.cancel()
        elif count == last:
            asyncio.get_running_loop().call_later(delay_s, task.cancel)
        try:
            yield awaited
            answer = functools.partial(work.send, None)
        except BaseException as error:
            answer = functools.partial(work.throw, error)


# --- the configuration that engines read


HOSTILE_KEYS = adapter_files(unknown=[[]] * 1000, rank_pattern={"(?:q|k|v)_proj": 4})


def test_engines_read_known_keys_only_and_verify_covers_them(make):
    resolver = make(FakeSource("s3", {"sql": HOSTILE_KEYS}))
    resolved = resolver.ask()
    assert content(resolved.path) == HOSTILE_KEYS
    assert resolved.size_bytes == sum(map(len, HOSTILE_KEYS.values()))
    canonical = resolved.path / "adapter_config.json"
    assert "unknown" not in canonical.read_text()
    manifest = Manifest.read(resolved.path)
    assert manifest.digest == digest_of(manifest.files)
    assert resolver.store.verify(resolved.digest)
    canonical.chmod(0o600)
    canonical.write_bytes(canonical.read_bytes().replace(b"4", b"5"))
    assert not resolver.store.verify(resolved.digest)


def test_an_entry_without_that_configuration_is_fetched_again(make):
    source = FakeSource("s3", {"sql": HOSTILE_KEYS})
    first = make(source).ask()
    manifest = first.path / "manifest.json"
    text = json.dumps({**json.loads(manifest.read_text()), "canonical": None})
    manifest.unlink()
    manifest.write_text(text)
    assert make(source).ask().path == first.path
    assert source.fetched == ["sql", "sql"]
    assert Manifest.read(first.path).canonical


def test_bytes_that_end_their_process_are_refused_once(serving, monkeypatch):
    monkeypatch.setattr(process_module, "_PROGRAM", ENDING)
    ending = Children()
    monkeypatch.setattr(versions_module, "children", lambda: ending)
    source, resolver = serving("s3", {"sql": GOOD})
    for _ in range(3):
        with pytest.raises(InvalidAdapter, match="ends the process that reads it"):
            resolver.ask()
    assert source.fetched == ["sql"]
    assert not resolver.store.layout.digests()


@pytest.mark.parametrize("fault", ["killed", "stalled", "full"])
def test_a_fault_is_met_once_within_its_retry_after(make, clock, monkeypatch, fault):
    """A reading process that is killed, or does not answer, and a full disk: each request would meet them again."""
    what = {"killed": "os.kill(os.getpid(), 9)", "stalled": "time.sleep(600)", "full": "verify(*_)"}[fault]
    first = "import os, time\nfrom lora_plugins.verification import child\nverify = child.verify_adapter\n"
    children = functools.cache(Children)
    monkeypatch.setattr(versions_module, "children", children)
    source = FakeSource("s3", {"sql": GOOD})
    with monkeypatch.context() as meanwhile:
        program(meanwhile, f"{first}child.verify_adapter = lambda *_: {what}")
        meanwhile.setattr(process_module, "wall_s", lambda _: 0.3 if fault == "stalled" else 60)
        if fault == "full":
            source.while_fetching = failing(OSError(errno.ENOSPC, "No space left on device"))
        resolver = make(source)
        while not children().pids():  # the resolver warms one, which must be of the program that fails
            time.sleep(0.01)
        for _ in range(3):
            with pytest.raises((SourceUnavailable, OutOfMemory)) as caught:
                resolver.ask()
            assert (caught.value.adapter, kind_of(caught.value)) == ("sql", ErrorKind.FAULT)
    tries = ["sql"] * (2 if fault == "full" else 1)  # where the disk has room by now, another fetch may have left it
    assert source.fetched == tries
    source.while_fetching = lambda: None
    clock.now_s += SourceUnavailable.retry_after_s
    assert content(resolver.ask().path) == GOOD
    assert source.fetched == [*tries, "sql"]


def test_fetched_files_that_vanish_are_no_missing_adapter(make, clock, monkeypatch):
    """As somebody removes them who cleans up in the store, before they are read."""
    resolver = make(FakeSource("s3", {"sql": GOOD}))
    read, complete = Children.read, PartialDownload.complete

    def hashed_before(self):
        complete(self)
        for file in self._files.values():
            file.finish()

    def after_the_cleaner(self, directory, settings, *, config_only=False):
        if not config_only:
            (directory / CONFIG_FILE).unlink()
        return read(self, directory, settings, config_only=config_only)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Children, "read", after_the_cleaner)
        meanwhile.setattr(PartialDownload, "complete", hashed_before)
        with pytest.raises(SourceUnavailable, match="gone from the store"):
            resolver.ask()
    clock.now_s += SourceUnavailable.retry_after_s
    assert content(resolver.ask().path) == GOOD


def test_a_fetch_ends_at_the_operators_limit(serving):
    source, resolver = serving("s3", {"sql": GOOD}, fetch_max_s=0.2)

    async def ask():
        source.gate = asyncio.Event()
        await resolver.resolve("sql", BASE.path)

    with pytest.raises(SourceUnavailable, match=r"within 0\.2 s.*raise LORA_PLUGINS_FETCH_MAX_S"):
        asyncio.run(ask())


ENDING = process_module._PROGRAM.replace(
    "main()",
    "import os\nfrom lora_plugins.verification import child\nchild.verify_adapter = lambda *_: os.abort()\nmain()",
)


def test_one_principals_copies_are_read_in_turns(make, readings):
    """After a restart each stored version is read before it is served, in two processes for everybody."""
    answers = {f"sql-{number}": adapter_files(lora_alpha=number + 1) for number in range(8)}
    source = FakeSource("s3", answers)
    before = make(source)
    for name in answers:
        before.ask(name)
    assert readings.most == 1
    after = make(source)
    after.principal = lambda: "team-a"

    async def run() -> None:
        await asyncio.gather(*(after.resolve(name, BASE.path) for name in answers))

    asyncio.run(run())
    assert (readings.most, len(source.fetched)) == (4, 8)


def test_a_version_in_the_store_waits_for_no_fetch(make, monkeypatch):
    """Another version waits; who asks next for the same adapter may have a place at once."""
    monkeypatch.setattr(admission, "_FETCHES_OF_ONE", 1)
    source = FakeSource("s3", {"here": adapter_files(lora_alpha=3), "sql": GOOD, "held": turned()})
    make(source).ask("here")
    resolver = make(source, fetch_timeout_s=0.2)

    async def beside_a_fetch_that_hangs():
        source.gate = asyncio.Event()
        held = asyncio.create_task(resolver.resolve("held", BASE.path))
        while source.fetched[-1] != "held":
            await asyncio.sleep(0.001)
        assert (await resolver.resolve("here", BASE.path)).name == "here"
        with pytest.raises(FetchesBusy, match=r"adapter 'sql'.*fetches from s3.*a turn within 0.2 s"):
            await resolver.resolve("sql", BASE.path)
        source.gate.set()
        await held
        return await resolver.resolve("sql", BASE.path)

    assert asyncio.run(beside_a_fetch_that_hangs()).name == "sql"
    assert source.fetched == ["here", "held", "sql"]


# --- files for chats


class Commits(FakeSource):
    """A source whose version of a name is a commit: other files of interest are no other version."""

    async def locate(self, name, base_model_name):
        found = await super().locate(name, base_model_name)
        return replace(found, version="commit") if isinstance(found, RemoteAdapter) else found


NAMED = {**GOOD, WEIGHTS_FILE: safetensors({k.replace(".weight", ".default.weight"): v for k, v in weights().items()})}


@pytest.mark.parametrize("files", [GOOD, NAMED], ids=["plain", "converted"])
def test_entries_with_and_without_files_for_chats_are_told_apart(make, files):
    """Nor the other way round; the store of a server before these files were fetched has such entries."""
    with_chat = Commits("hub", {"sql": {**files, **CHAT}})
    base = make(with_chat, adapter_chat=AdapterChat.BASE).ask()
    assert not {*CHAT} & {*content(base.path)}
    adapter = make(with_chat).ask()
    assert content(adapter.path).items() >= CHAT.items()
    assert make(with_chat).ask().digest == adapter.digest
    assert with_chat.fetched == ["sql", "sql"], "no third time"
    assert make(with_chat, adapter_chat=AdapterChat.BASE).ask().digest == base.digest
    assert base.digest == make(FakeSource("s3", {"sql": files})).ask().digest, "of the other files alone"


def test_a_restored_version_gets_its_files_for_chats_once_located(make):
    source = Commits("hub", {"sql": {**GOOD, **CHAT}})
    before = make(source, adapter_chat=AdapterChat.BASE)
    version = before.ask()
    after = make(source)
    assert restored(after, "sql", None, version.digest, before.place_of(version)).digest == version.digest
    assert content(newest(after).path) == {**GOOD, **CHAT}
    assert newest(after) is newest(after)


def test_a_broken_file_for_chats_is_said_with_the_version(make):
    resolver = make(FakeSource("s3", {"sql": {**GOOD, TOKENIZER_FILE: b"{"}}))
    (unused,) = resolver.chats.at(str(resolver.ask().path)).unused
    assert unused.startswith(f"{TOKENIZER_FILE} (text that stops being JSON")


@pytest.mark.parametrize("name", CHAT)
def test_a_long_file_for_chats_is_left_at_its_source(make, name):
    files = {**GOOD, name: b"x" * (MAX_BYTES[name] + 1)}
    found = make(FakeSource("s3", {"sql": files})).ask()
    assert content(found.path) == GOOD
    assert found.warnings == (f"not used of the adapter's files for chats: {name} (too large)",)
    strict = make(source := FakeSource("s3", {"sql": files}), adapter_chat=AdapterChat.STRICT)
    with pytest.raises(InvalidAdapter, match=f"{MAX_BYTES[name]}") as refused:
        strict.ask()
    assert (refused.value.file, source.fetched) == (name, [])
    assert make(FakeSource("s3", {"sql": files}), adapter_chat=AdapterChat.BASE).ask().warnings == ()


# --- restored from the store by a later server


@pytest.fixture
def stored(make):
    """A version that an earlier server brought from a source, and the place that the server knows it by."""

    def store(label: str):
        before = make(FakeSource(label, {"sql": GOOD}))
        version = before.ask()
        return version, before.place_of(version)

    return store


def restored(resolver: RecordingResolver, name: str, uri: str | None, digest: str, place: str):
    return asyncio.run(resolver.restored(name, uri, digest, place))


def test_a_later_server_restores_a_version_without_asking_its_source(make, stored):
    version, place = stored("s3")
    away = FakeSource("s3", {"sql": SourceUnavailable("no answer")})
    other = FakeSource("hub", {"sql": turned()})
    after = make(away, other)
    found = restored(after, "sql", None, version.digest, place)
    assert (found.path, found.source, found.uri) == (version.path, "s3", version.uri)
    assert (away.asked, other.asked) == ([], [])
    assert leased(after, found)
    with pytest.raises(SourceUnavailable):  # the Hub does not stand in for the source that the version came from
        newest(after, "sql")
    assert of_digest(after, "sql", version.digest[:12]).path == version.path


def test_a_version_of_another_packages_source_is_restored_twice(make, stored):
    """Its URIs have a scheme of their own, by which nobody knows the source's label."""
    version, place = stored("zip")
    for _ in range(2):
        after = make(FakeSource("zip", {"sql": adapter_files()}))
        found = restored(after, "sql", None, version.digest, place)
        assert (found.source, after.place_of(found)) == ("zip", place)
        assert of_digest(after, "sql", version.digest[:12]).source == "zip"


def test_nothing_is_restored_that_this_server_would_not_find(make, stored):
    version, place = stored("s3")
    after = make(FakeSource("s3", {"sql": adapter_files()}))
    holders = set(after.store.leases.holders(version.digest))
    assert restored(after, "sql", None, version.digest, "s3 (s3://another/bucket)") is None
    assert restored(after, "sql", None, "ab" * 32, place) is None
    assert restored(make(FakeSource("hub")), "sql", None, version.digest, place) is None
    with pytest.raises(InvalidAdapter):
        restored(after, "sql", "s3://not/allowed", version.digest, place)
    assert set(after.store.leases.holders(version.digest)) == holders


# --- warnings


SERVED, OTHER = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B"
SAID = f"trained on {OTHER}, served on {SERVED}: another name (coder, not plain)"


def test_a_warning_is_kept_with_the_version(make, logged, monkeypatch):
    """From the verification to the log, the list of adapters and the answers."""
    monkeypatch.setattr(fakes, "LogEvents", functools.cache(fakes.LogEvents))  # of one server
    bases = {"coder": OTHER, "same": "unsloth/qwen2.5-7b-bnb-4bit"}
    source = FakeSource("s3", {name: adapter_files(base_model_name_or_path=base) for name, base in bases.items()})
    for _ in range(2):  # the second time as after a restart, out of the store
        resolver = make(source)
        resolver.base = replace(BASE, path=SERVED)
        warned, same = resolver.ask("coder"), resolver.ask("same")
        assert (warned.warnings, same.warnings) == ((SAID,), ())
        assert (resolver.known.warnings_of(warned.digest), resolver.known.warnings_of(same.digest)) == ((SAID,), ())
        assert of_digest(resolver, "coder", warned.digest).warnings == (SAID,)
        events = [event for event in resolver.emitted if isinstance(event, AdapterResolved)]
        assert [event.warnings for event in events] == [(SAID,), ()]
    lines = [record for record in logged.records if SAID in record.message]
    assert [record.levelno for record in lines] == [logging.WARNING, logging.DEBUG], "once for a version"
    assert lines[0].message.startswith("Adapter 'coder' (")
    assert not any("every shape fits" in record.message and "coder" in record.message for record in logged.records)
