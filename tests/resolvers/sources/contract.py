"""What every source must do. A source's tests subclass `SourceContract` and give it a harness."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lora_plugins import testing
from lora_plugins.absence import Absence
from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.chat import TEMPLATE_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    SourceUnavailable,
)
from lora_plugins.events import Events
from lora_plugins.resolvers import versions
from lora_plugins.resolvers.file_selection import select_files
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import ADAPTER_FILES, RemoteAdapter, Source, VersionChanged
from lora_plugins.settings import Settings
from lora_plugins.store.inventory import entries
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.testing import SourceHarness
from lora_plugins.verification.protocol import ReadAdapter
from tests.make import BASE, CHAT, adapter_files, config_bytes, content, sharded, weights

ALL_FILES = (CONFIG_FILE, WEIGHTS_FILE, *PICKLE_FILES)


def locate(source: Source, name: str) -> RemoteAdapter | None:
    found = asyncio.run(source.locate(AdapterName.parse(name), BASE.path))
    return None if isinstance(found, Absence) else found


def located(source: Source, name: str) -> RemoteAdapter:
    found = locate(source, name)
    assert found is not None
    return found


def obtain(store: Store, source: Source, found: RemoteAdapter, settings: Settings | None = None) -> StoredAdapter:
    """Admit, fetch, verify and publish what was located, as the resolver does."""
    return asyncio.run(obtaining(store, source, found, settings or Settings()))


async def obtaining(store: Store, source: Source, found: RemoteAdapter, settings: Settings) -> StoredAdapter:
    selected = select_files(found, settings)
    fetch = partial(source.fetch, selected)
    return await store.obtain(selected, fetch, lambda directory: check(directory, settings))


def verify(directory: Path, settings: Settings | None = None) -> int:
    """The rank of an adapter that this verifies; it says which one it is."""
    return verify_adapter(directory, BASE, settings or Settings()).config.rank


def check(directory: Path, settings: Settings | None = None) -> ReadAdapter:
    verified = verify_adapter(directory, BASE, settings or Settings())
    return ReadAdapter(verified, canonical_bytes(verified.config))


def ranked(rank: int) -> dict[str, bytes]:
    return adapter_files(weights(rank), r=rank)


def turned() -> dict[str, bytes]:
    """Other bytes than `adapter_files()`, in files of the same sizes."""
    return adapter_files({name: -array for name, array in weights().items()}, lora_alpha=9)


class SourceContract(testing.SourceContract):
    """The public contract, and what ours promise besides. Subclasses define the fixture `harness`."""

    @pytest.fixture
    def source(self, harness: SourceHarness) -> Source:
        return harness.make_source()

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(tmp_path / "contract-store")

    @pytest.fixture
    def find(self, harness: SourceHarness, source: Source):
        """What the source says of a name."""
        return lambda name: locate(source, harness.asked(name))

    @pytest.fixture
    def rank(self, harness: SourceHarness, source: Source, store: Store):
        """Fetch a name through the store and say which adapter came."""
        return lambda name: verify(obtain(store, source, located(source, harness.asked(name))).directory)

    @pytest.fixture
    def leftovers(self, harness: SourceHarness, store: Store):
        def leftovers() -> list[str]:
            harness.settle()
            return [entry.name for entry in os.scandir(store.layout.folder("tmp"))]

        return leftovers

    # --- locating

    def test_an_absence_names_its_source_and_place(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        for name in ("team/other", "sql@v9"):
            absence = asyncio.run(source.locate(AdapterName.parse(harness.asked(name)), BASE.path))
            assert (absence.source, absence.was_asked) == (source.label, True)
            assert all(part in absence.place for part in name.split("@"))
            assert absence.detail

    def test_a_failure_names_its_place(self, harness, source):
        harness.put_adapter("team/sql", {WEIGHTS_FILE: b"x"})
        name = AdapterName.parse(harness.asked("team/sql"))
        with pytest.raises(AdapterNotFound) as caught:
            asyncio.run(source.locate(name, BASE.path))
        assert "team/sql" in caught.value.place
        harness.break_source()
        try:
            with pytest.raises(SourceUnavailable) as caught:
                asyncio.run(source.locate(name, BASE.path))
        finally:
            harness.restore_source()
        assert "team/sql" in caught.value.place

    def test_each_name_finds_its_own_adapter(self, harness, find, rank):
        assert find("sql") is None
        ranks = {"sql": 4, "sql/checkpoint-10": 8, "team/a/sql": 16, "sql@v2": 2, "größe/模型 (2)": 1}
        for name, of_adapter in ranks.items():
            harness.put_adapter(name, ranked(of_adapter))
        assert {name: rank(name) for name in ranks} == ranks
        assert find("sql@v2").name.revision == "v2"
        uris = {find(name).uri for name in ranks if "@" not in name}
        assert len(uris) == 4
        assert all(re.match(r"[a-z0-9]+://", uri) for uri in uris)
        for name in ("team", "team/a", "sql@v9", "sql@refs/pr/1"):
            assert find(name) is None, name

    def test_a_name_is_never_a_pattern(self, harness, find, rank):
        for name in ("sql", "axbyc", "s"):
            harness.put_adapter(name, ranked(4))
        for name in ("*", "s*", "sq?", "[s]ql", "s[q]l", "sql*", "**", "a*b?c", "a[*]b[?]c"):
            assert find(name) is None, name
        harness.put_adapter("a*b?c", ranked(8))
        harness.put_adapter("[s]ql", ranked(16))
        assert (rank("a*b?c"), rank("[s]ql"), rank("axbyc"), rank("sql")) == (8, 16, 4, 4)

    def test_only_an_adapters_own_files_are_located_in_their_sizes(self, harness, find):
        files = {**adapter_files(), PICKLE_FILES[0]: b"pickle"}
        others = {"README.md": b"x", "optimizer.pt": b"y" * 99, "adapter_config.json.bak": b"{}", "config.json": b"{}"}
        harness.put_adapter("sql", {**files, **others})
        harness.put_adapter("sql/checkpoint-10", ranked(8))
        found = find("sql")
        assert {file.name: file.size_bytes for file in found.files} == {name: len(data) for name, data in files.items()}
        assert {file.name for file in found.files} <= set(ADAPTER_FILES)
        assert [name for name, _, _ in found.promised] == [file.name for file in found.files]

    def test_weights_in_several_files_are_fetched_with_their_index(self, harness, source, find, tmp_path):
        files = sharded(adapter_files())
        harness.put_adapter(
            "sql", {**files, "adapter_model-x.safetensors": b"x", "model-00001-of-00002.safetensors": b"y"}
        )
        harness.put_adapter("sql/checkpoint-10", {"adapter_model-00003-of-00003.safetensors": b"z"})
        found = find("sql")
        assert {file.name: file.size_bytes for file in found.files} == {name: len(data) for name, data in files.items()}
        stored = obtain(Store(tmp_path / "several"), source, found)
        assert content(stored.directory) == files
        harness.put_adapter("sql", adapter_files())
        assert {file.name for file in select_files(find("sql"), Settings()).files} == {CONFIG_FILE, WEIGHTS_FILE}

    def test_files_for_chats_are_fetched_with_the_weights(self, harness, source, find, store, rank):
        """Alone they are no adapter."""
        harness.put_adapter("sql", files := {**sharded(adapter_files()), **CHAT})
        harness.put_adapter("half", {**adapter_files(), TEMPLATE_FILE: CHAT[TEMPLATE_FILE]})
        harness.put_adapter("model", {**CHAT, "config.json": b"{}"})
        harness.put_adapter("none", {**CHAT, CONFIG_FILE: config_bytes()})
        assert content(obtain(store, source, find("sql")).directory) == files
        assert {file.name for file in find("half").files} == {*adapter_files(), TEMPLATE_FILE}
        assert find("model") is None
        with pytest.raises(AdapterNotFound, match="no weights"):
            rank("none")

    def test_another_template_is_another_version(self, harness, source, find, store):
        versions = []
        for template in (None, b"{{ one }}", b"{{ two }}"):
            harness.put_adapter("sql", adapter_files() if template is None else {TEMPLATE_FILE: template})
            versions.append(find("sql"))
            files = content(obtain(store, source, versions[-1]).directory)
            assert files.get(TEMPLATE_FILE) == template
        assert len({found.version for found in versions}) == 3

    # --- listing

    def test_the_names_that_it_lists_are_those_that_it_finds(self, harness, source):
        adapters = ("sql", "sql/checkpoint-10", "team/a/größe (2)")
        for name in adapters:
            harness.put_adapter(name, adapter_files())
        harness.put_adapter("model", {"config.json": b"{}", "model.safetensors": b"x"})
        harness.put_adapter("half", {WEIGHTS_FILE: b"x"})
        listing = asyncio.run(source.names(BASE.path))
        assert (listing.names, listing.gaps) == (tuple(sorted(map(harness.asked, adapters))), ())
        assert all(located(source, name).name == AdapterName.parse(name) for name in listing.names)

    def test_an_outage_is_no_empty_list(self, harness, source):
        harness.put_adapter("sql", adapter_files())
        harness.break_source()
        try:
            listing = asyncio.run(source.names(BASE.path))
        except SourceUnavailable:
            return
        finally:
            harness.restore_source()
        assert (listing.names, len(listing.gaps)) == ((), 1)

    # --- versions

    def test_nothing_changed_is_the_same_version(self, harness, find):
        harness.put_adapter("sql", adapter_files())
        first = find("sql")
        assert find("sql") == first
        if not harness.commits:
            harness.put_adapter("other", ranked(8))
            harness.put_adapter("sql/checkpoint-10", ranked(8))
            harness.put_adapter("sql", {"README.md": b"read me"})
            assert find("sql") == first

    # --- fetching

    def test_exactly_the_located_files_are_written(self, harness, source, find, tmp_path):
        files = {**adapter_files(), **dict.fromkeys(PICKLE_FILES, b"pickle"), "README.md": b"x", "optimizer.pt": b"y"}
        harness.put_adapter("sql", files)
        (tmp_path / "arriving").mkdir()
        arriving = PartialDownload(tmp_path / "arriving", [CONFIG_FILE])
        found = find("sql")
        asyncio.run(source.fetch(replace(found, files=found.files[:1]), arriving))
        harness.settle()
        assert content(arriving.directory) == {CONFIG_FILE: files[CONFIG_FILE]}
        assert [(file.name, file.size_bytes) for file in arriving.finish()] == [(CONFIG_FILE, len(files[CONFIG_FILE]))]

    @pytest.mark.parametrize("is_large", [True, False])
    def test_what_its_configuration_condemns_is_fetched_once(
        self, harness, source, store, monkeypatch, leftovers, is_large
    ):
        harness.put_adapter("sql", {**adapter_files(use_qalora=True), **CHAT})
        fetch, arrived = source.fetch, []

        async def watched(adapter: RemoteAdapter, download: PartialDownload) -> None:
            await fetch(adapter, download)
            arrived.append({entry.name for entry in os.scandir(download.directory) if entry.is_file()})

        monkeypatch.setattr(source, "fetch", watched)
        if is_large:
            monkeypatch.setattr(versions, "_COPIED_AT_ONCE_BYTES", 0)
        resolver = AdapterResolver(Settings(), Events(), store, [source])
        for _ in range(2):
            with pytest.raises(IncompatibleAdapter, match="QALoRA"):
                asyncio.run(resolver.resolve(harness.asked("sql"), BASE.path))
        harness.settle()
        of_all = {name for name in (*adapter_files(), *CHAT) if "/" not in name}
        assert arrived == [{CONFIG_FILE} if is_large or source.remote else of_all], "weights only from a disk"
        assert (entries(store.layout), leftovers()) == ([], [])

    def test_what_was_put_is_published_and_fetched_once(self, harness, source, store, find, leftovers):
        """And does not depend on its source."""
        harness.put_adapter("sql", {**adapter_files(), "README.md": b"x"})
        stored = obtain(store, source, find("sql"))
        assert (stored.fetched, leftovers()) == (True, [])
        assert not obtain(store, source, find("sql")).fetched
        harness.put_adapter("sql", ranked(8))
        assert content(obtain(store, source, find("sql")).directory) == ranked(8)
        assert content(stored.directory) == adapter_files()
        assert store.verify(stored.digest)

    @pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
    def test_changed_while_it_is_fetched_is_never_a_mix(self, harness, source, store, find, leftovers, file):
        old, new = adapter_files(), turned()
        harness.put_adapter("sql", old)
        found = find("sql")

        async def fetch(arriving: PartialDownload) -> None:
            landed = arriving.landed

            def change_then_say(name: str, size_bytes: int) -> None:
                arriving.landed = landed
                harness.put_adapter("sql", {file: new[file]})
                landed(name, size_bytes)

            arriving.landed = change_then_say
            await source.fetch(found, arriving)

        try:
            stored = asyncio.run(store.obtain(found, fetch, check))
        except VersionChanged:
            assert store.layout.digests() == []
        else:
            assert content(stored.directory) == old
        assert leftovers() == []
        assert content(obtain(store, source, find("sql")).directory) == {**old, file: new[file]}

    def test_many_are_fetched_at_once(self, harness, source, store):
        ranks = {f"sql-{rank}": rank for rank in (1, 2, 4, 8)}
        for name, rank in ranks.items():
            harness.put_adapter(name, ranked(rank))

        async def serve(name: str) -> int:
            found = await source.locate(AdapterName.parse(harness.asked(name)), BASE.path)
            return verify((await obtaining(store, source, found, Settings())).directory)

        async def serve_all() -> list[int]:
            return await asyncio.gather(*(serve(name) for name in [*ranks] * 3))

        assert asyncio.run(serve_all()) == [*ranks.values()] * 3

    # --- what is wrong

    def test_a_broken_adapter_is_never_none(self, harness, rank, store, leftovers):
        broken = {
            "no-configuration": ({WEIGHTS_FILE: b"x"}, AdapterNotFound),
            "no-weights": ({CONFIG_FILE: config_bytes()}, AdapterNotFound),
            "broken-configuration": ({CONFIG_FILE: b"{", WEIGHTS_FILE: b"x"}, InvalidAdapter),
            "empty-weights": ({CONFIG_FILE: config_bytes(), WEIGHTS_FILE: b""}, InvalidAdapter),
            "broken-weights": ({CONFIG_FILE: config_bytes(), WEIGHTS_FILE: b"short"}, InvalidAdapter),
            "a-pickle": ({CONFIG_FILE: config_bytes(), PICKLE_FILES[0]: b"x"}, InvalidAdapter),
            "a-pickle-alone": ({PICKLE_FILES[0]: b"x"}, AdapterNotFound),
        }
        for name, (files, kind) in broken.items():
            harness.put_adapter(name, files)
            with pytest.raises(kind) as caught:
                rank(name)
            assert caught.value.file in ADAPTER_FILES, name
        assert store.layout.digests() == []
        assert leftovers() == []
