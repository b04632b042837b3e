"""A resolver over a test's own store, its clock, and the servers that all files of one process share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cachetools import TTLCache

from lora_plugins.resolvers import resolver as resolver_module
from lora_plugins.resolvers import search
from lora_plugins.resolvers.known_versions import KnownVersions
from lora_plugins.store.store import Store
from lora_plugins.verification.children import Children
from testbed.hub import Hub, local_hub
from testbed.proxy import FaultProxy, fault_proxy
from testbed.s3 import S3, s3_server
from tests.resolvers.fakes import Clock, FakeSource, Readings, RecordingResolver
from tests.resolvers.sources.object_bed import Bed
from tests.resolvers.sources.web_bed import web

_ = web


@pytest.fixture
def make(tmp_path: Path):
    """A resolver over these sources and the test's one store."""
    return lambda *sources, **settings: RecordingResolver(tmp_path / "store", *sources, **settings)


@pytest.fixture
def serving(make):
    """One source with these answers, and a resolver over the source."""

    def serve(label, answers=None, *, remote=True, **settings) -> tuple[FakeSource, RecordingResolver]:
        source = FakeSource(label, answers, remote=remote)
        return source, make(source, **settings)

    return serve


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    """The readings from now on."""
    readings, under_way, read = Readings(), set[object](), Children.read

    def counted(self, directory, *args, config_only=False, **more):
        answer = read(self, directory, *args, config_only=config_only, **more)
        readings.asked.append(directory)
        readings.of_weights += [] if config_only else [directory]
        under_way.add(answer)
        answer.add_done_callback(under_way.discard)
        readings.most = max(readings.most, len(under_way))
        return answer

    monkeypatch.setattr(Children, "read", counted)
    return readings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the resolvers of this test read off the time for which they remember."""
    clock = Clock()
    monkeypatch.setattr(resolver_module, "KnownVersions", partial(KnownVersions, timer=clock))
    monkeypatch.setattr(search, "TTLCache", partial(TTLCache, timer=clock))
    return clock


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_proxy(s3: S3) -> Iterator[FaultProxy]:
    with fault_proxy(s3.url) as proxy:
        yield proxy


@pytest.fixture
def bed(s3: S3, shared_proxy: FaultProxy, tmp_path: Path) -> Iterator[Bed]:
    """S3 behind the proxy, and a store."""
    s3.reset()
    shared_proxy.clear()
    shared_proxy.forget()
    yield Bed(s3, shared_proxy, s3.bucket(), Store(tmp_path / "store"))
    shared_proxy.refuse(False)


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    with local_hub() as running:
        yield running


@pytest.fixture(scope="session")
def hub_proxy(hub_server: Hub) -> Iterator[FaultProxy]:
    with fault_proxy(hub_server.url) as running:
        yield running
