"""Redirects elsewhere and error pages without an end, and synchronous file systems that hang."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from aiohttp import web
from fsspec.implementations.memory import MemoryFileSystem

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources import fsspec as fsspec_module
from lora_plugins.resolvers.sources.object_store import ObjectSource
from lora_plugins.resolvers.sources.ranges import DownloadLimits
from lora_plugins.resolvers.sources.source import OWN_FILES, RemoteAdapter
from lora_plugins.store.store import Store
from testbed import faults
from testbed.listener import Listener
from testbed.proxy import fault_proxy
from tests.make import adapter_files
from tests.resolvers.sources.contract import content, obtain

FILES = adapter_files()


class Origin(Listener):
    """Serves one adapter below /real/; what lies below the other paths redirects."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.asked: list[str] = []
        self.elsewhere = ""
        self.sent_bytes = 0
        self.has_moved = False
        self.of_unknown = 404

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request.path)
        _, place, *rest = request.path.split("/")
        if place == "real" and not self.has_moved:
            data = FILES.get(rest[-1])
            if data is None:
                return web.Response(status=self.of_unknown)
            start, _, end = (
                request.headers.get("Range", f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
            )
            piece = data[int(start) : int(end) + 1]
            headers = {"ETag": f'"{hash(data)}"', "Accept-Ranges": "bytes"}
            if "Range" not in request.headers:
                return web.Response(body=piece, headers=headers)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return web.Response(status=206, body=piece, headers=headers)
        if place == "endless":
            answer = web.StreamResponse(status=403)
            await answer.prepare(request)
            while True:
                await answer.write(b"x" * 65_536)
                self.sent_bytes += 65_536
        target = {
            "real": f"{self.elsewhere}/real",
            "moved": "/real",
            "twice": "/moved",
            "away": f"{self.elsewhere}/real",
            "local": "http://169.254.169.254",
        }
        return web.Response(status=302, headers={"Location": "/".join((target[place], *rest))})


@pytest.fixture
def origins() -> Iterator[tuple[Origin, Origin]]:
    one, other = Origin(), Origin()
    one.elsewhere = other.url
    for origin in (one, other):
        origin.start()
    yield one, other
    for origin in (one, other):
        origin.stop()


def locate(origin: Origin, place: str, **options: object) -> tuple[ObjectSource, RemoteAdapter | Absence]:
    source = ObjectSource(f"{origin.url}/{place}/{{lora_name}}", storage_options=options, locate_timeout_s=20)
    return source, asyncio.run(source.locate(AdapterName("sql"), ""))


@pytest.mark.parametrize("place", ["real", "moved", "twice"])
def test_redirects_of_its_own_origin_are_followed(origins, tmp_path, place):
    source, found = locate(origins[0], place)
    assert content(obtain(Store(tmp_path / "store"), source, found).directory) == FILES


def test_denied_files_for_chats_are_no_error(origins, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FILES", {**dict.fromkeys(OWN_FILES, b"x"), **FILES})
    origins[0].of_unknown = 403
    _, found = locate(origins[0], "real")
    assert {file.name for file in found.files} == {*OWN_FILES}


@pytest.mark.parametrize("place", ["away", "local"])
@pytest.mark.parametrize("options", [{}, {"client_kwargs": {"headers": {"X-Api-Key": "secret"}}}], ids=["plain", "key"])
def test_a_redirect_to_another_origin_is_not_followed(origins, place, options):
    one, other = origins
    with pytest.raises(SourceUnavailable, match="HTTP 302 that leads to another origin"):
        locate(one, place, **options)
    assert other.asked == []


def test_a_redirect_between_locating_and_fetching_is_refused(origins, tmp_path):
    one, other = origins
    source, found = locate(one, "real")
    one.has_moved = True
    with pytest.raises(SourceUnavailable, match="HTTP 302 that leads to another origin"):
        obtain(Store(tmp_path / "store"), source, found)
    assert other.asked == []


def test_an_error_page_without_an_end_is_not_read(origins):
    started = time.monotonic()
    with pytest.raises(SourceUnavailable, match="HTTP 403"):
        locate(origins[0], "endless")
    assert time.monotonic() - started < 15
    assert origins[0].sent_bytes < 64 << 20


def test_a_slow_web_server_that_goes_on_outlasts_the_deadline(origins, tmp_path):
    with fault_proxy(origins[0].url) as proxy:
        proxy.plan(faults.throttle(len(FILES[WEIGHTS_FILE]) / 4), path=WEIGHTS_FILE, method="GET", times=None)
        source = ObjectSource(f"{proxy.url}/real/{{lora_name}}", limits=DownloadLimits(1.5), locate_timeout_s=60)
        found, began = asyncio.run(source.locate(AdapterName("sql"), "")), time.monotonic()
        assert content(obtain(Store(tmp_path / "store"), source, found).directory) == FILES
    assert time.monotonic() - began > 2 * 1.5


def test_a_slow_file_system_that_goes_on_outlasts_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, read = fsspec.filesystem("memory"), MemoryFileSystem.cat_file
    for name, data in FILES.items():
        memory.pipe_file(f"/slow/sql/{name}", data)

    def slow(self: MemoryFileSystem, path: str, **options: int) -> bytes:
        time.sleep(0.2)
        return read(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", slow)
    monkeypatch.setattr(fsspec_module, "PIECE_BYTES", len(FILES[WEIGHTS_FILE]) // 10)
    source, began = ObjectSource("memory://slow/{lora_name}", limits=DownloadLimits(1.0)), time.monotonic()
    found = asyncio.run(source.locate(AdapterName("sql"), ""))
    assert content(obtain(Store(tmp_path / "store"), source, found).directory) == FILES
    assert time.monotonic() - began > 2.0


def test_a_hanging_thread_does_not_outlast_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe_file(f"/hangs/sql/{name}", data)
    ends, hanging = threading.Event(), []
    read = MemoryFileSystem.cat_file

    def hang(self: MemoryFileSystem, path: str, **options: int) -> bytes:
        hanging.append(path)
        ends.wait(20)
        data = read(self, path, **options)
        hanging.remove(path)
        return bytes(len(data))

    source = ObjectSource("memory://hangs/{lora_name}", limits=DownloadLimits(0.3))
    found = asyncio.run(source.locate(AdapterName("sql"), ""))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", hang)
    try:
        with pytest.raises(SourceUnavailable, match=r"within 0\.3 s"):
            obtain(Store(tmp_path / "store"), source, found)
        assert hanging, "the fetch waited for the thread"
    finally:
        ends.set()
        memory.rm("/hangs", recursive=True)


def test_a_client_that_connects_as_it_is_made_stops_nobody(tmp_path: Path) -> None:
    """All sources of fsspec share one event loop; Python's client of FTP waits there for a greeting, for 30 s."""
    for name, data in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/beside/sql/{name}", data)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"host": "127.0.0.1", "port": silent.getsockname()[1]}
        stalled = ObjectSource("ftp://adapters/{lora_name}", storage_options=place, locate_timeout_s=1.0)
        beside = ObjectSource("memory://beside/{lora_name}")

        async def run() -> tuple[object, RemoteAdapter | Absence]:
            asked = asyncio.create_task(stalled.locate(AdapterName("sql"), ""))
            await asyncio.to_thread(silent.accept)
            found = await beside.locate(AdapterName("sql"), "")
            assert not asked.done()
            return (await asyncio.gather(asked, return_exceptions=True))[0], found

        began = time.monotonic()
        error, found = asyncio.run(run())
        assert time.monotonic() - began < 15
    assert isinstance(found, RemoteAdapter)
    assert isinstance(error, SourceUnavailable)
    assert "within 1" in str(error)
