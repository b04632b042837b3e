"""The shared contract for the sources behind a network: S3 over HTTP, fsspec's memory, and a local Hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub.utils import _http as hub_http

from lora_plugins.resolvers.sources import hub as hub_module
from lora_plugins.resolvers.sources.fsspec import FsspecFiles
from lora_plugins.resolvers.sources.hub import HubSource
from lora_plugins.resolvers.sources.hub_repos import HubPatterns
from lora_plugins.resolvers.sources.object_store import ObjectSource
from testbed.hub import Hub
from testbed.proxy import FaultProxy
from tests.make import adapter_files
from tests.resolvers.sources.contract import SourceContract, SourceHarness
from tests.resolvers.sources.hub_bed import isolate, wait_for_threads
from tests.resolvers.sources.object_bed import LIMITS, Bed


class S3Harness(SourceHarness):
    def __init__(self, bed: Bed) -> None:
        self.bed = bed

    def make_source(self) -> ObjectSource:
        return self.bed.source()

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        self.bed.put(name, dict(files))

    def break_source(self) -> None:
        self.bed.proxy.refuse()

    def restore_source(self) -> None:
        self.bed.proxy.refuse(False)


class TestS3Source(SourceContract):
    @pytest.fixture
    def harness(self, bed: Bed) -> S3Harness:
        return S3Harness(bed)


class MemoryHarness(SourceHarness):
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = fsspec.filesystem("memory")
        self.patch = monkeypatch

    def make_source(self) -> ObjectSource:
        return ObjectSource("memory://contract/{lora_name}", limits=LIMITS)

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        for file, data in files.items():
            self.memory.pipe_file(f"/contract/{name}/{file}", data)

    def break_source(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ConnectionRefusedError

        self.context = self.patch.context()
        patch = self.context.__enter__()
        for call in ("info", "ls", "cat_file", "_open"):
            patch.setattr(MemoryFileSystem, call, refuse)

    def restore_source(self) -> None:
        self.context.__exit__(None, None, None)


class TestMemorySource(SourceContract):
    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryHarness]:
        harness = MemoryHarness(monkeypatch)
        harness.memory.makedirs("/contract", exist_ok=True)
        yield harness
        harness.memory.rm("/contract", recursive=True)

    def test_an_object_that_stands_for_its_folder_is_no_entry(self, harness, monkeypatch):
        """Consoles of object stores make them, and some file systems list them as folders."""
        listed = MemoryFileSystem.ls

        def ls(self: MemoryFileSystem, path: str, **options: object) -> list[object]:
            return [{"name": f"{path}/", "size": 0, "type": "directory"}, *listed(self, path, **options)]

        harness.put_adapter("team/sql", adapter_files())
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "ls", ls)
            found = asyncio.run(FsspecFiles("memory", {}).list_below("memory://contract"))
        assert sorted(found) == sorted(f"memory://contract/team/sql/{file}" for file in adapter_files())


class HubHarness(SourceHarness):
    """Folders of one repository; a revision is a branch."""

    commits = True
    repo = "team/loras"

    def __init__(self, hub: Hub, proxy: FaultProxy, cache: Path) -> None:
        self.hub = hub
        self.proxy = proxy
        self.cache = cache
        hub.commit(self.repo, {"README.md": b"adapters"})

    def asked(self, name: str) -> str:
        return f"{self.repo}/{name}"

    def make_source(self) -> HubSource:
        patterns = HubPatterns.parse([self.repo])
        return HubSource(patterns, timeout_s=120, endpoint=self.proxy.url, cache_dir=self.cache)

    def put_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        folder, _, revision = name.partition("@")
        self.hub.commit(self.repo, {f"{folder}/{n}": data for n, data in files.items()}, branch=revision or "main")

    def break_source(self) -> None:
        self.proxy.refuse()

    def restore_source(self) -> None:
        self.proxy.refuse(False)

    def settle(self) -> None:
        wait_for_threads()


class TestHubSource(SourceContract):
    @pytest.fixture
    def harness(
        self, hub_server: Hub, hub_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[HubHarness]:
        hub_server.reset()
        hub_proxy.clear()
        isolate(monkeypatch, tmp_path)
        # An outage is an outage, sooner: two attempts, and huggingface_hub's own five without its half minute of waits.
        monkeypatch.setattr(hub_module, "_ATTEMPTS", 2)
        monkeypatch.setattr(hub_http, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100)))
        yield HubHarness(hub_server, hub_proxy, tmp_path / "hub-cache")
        hub_proxy.refuse(False)
