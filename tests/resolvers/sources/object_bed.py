"""S3 behind the fault proxy, a store, and a source between them: the fixture `bed`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.absence import Absence
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.resolvers.sources.object_store import ObjectSource
from lora_plugins.resolvers.sources.ranges import DownloadLimits
from lora_plugins.resolvers.sources.s3 import s3_storage_options
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.store.store import Store, StoredAdapter
from testbed.proxy import FaultProxy
from testbed.s3 import S3, Bucket
from tests.make import content

RANGE = 256 << 10
LIMITS = DownloadLimits(range_bytes=RANGE, parallel=4, timeout_s=60, attempts=4, wait_s=0.01, max_wait_s=0.05)
# Four ranges and a little one.
WEIGHTS = os.urandom(4 * RANGE + 1000)
FILES = {CONFIG_FILE: b'{"r": 4}', WEIGHTS_FILE: WEIGHTS}
BASE = "org/base"
ACCESS_POINT = "arn:aws:s3:eu-central-1:123456789012:accesspoint/team"
ACCESS_POINT_ENDPOINT = "http://s3.test"


@dataclass
class Bed:
    s3: S3
    proxy: FaultProxy
    bucket: Bucket
    store: Store

    def source(
        self, template: str = "", *, url: str = "", read_timeout_s: float = 30.0, **changes: Any
    ) -> ObjectSource:
        options = s3_storage_options(self.s3.env(url or self.proxy.url))
        options["config_kwargs"] |= {"read_timeout": read_timeout_s, "connect_timeout": max(30.0, read_timeout_s)}
        template = template or f"s3://{self.bucket.name}/loras/{{lora_name}}"
        return ObjectSource(template, **{"storage_options": options, "limits": LIMITS, **changes})

    def at_access_point(self, monkeypatch: pytest.MonkeyPatch) -> Bed:
        """The same with a bucket that has no name but `ACCESS_POINT`, for clients of `ACCESS_POINT_ENDPOINT`."""
        # The ARN becomes a host name, <name>-<account>.<endpoint's host>, which no DNS has: the server is the proxy.
        monkeypatch.setenv("http_proxy", self.s3.url)
        return replace(self, bucket=self.s3.bucket("team-123456789012"))

    def put(self, name: str = "sql", files: dict[str, bytes] | None = None) -> None:
        self.bucket.put_many(f"loras/{name}", FILES if files is None else files)

    async def obtain(self, source: ObjectSource, located: RemoteAdapter) -> StoredAdapter:
        fetch = partial(source.fetch, located)
        return await self.store.obtain(located, fetch, lambda _: SimpleNamespace(canonical=b"{}"))

    async def ask(self, source: ObjectSource, name: str = "sql") -> StoredAdapter | None:
        located = await source.locate(AdapterName.parse(name), BASE)
        return None if isinstance(located, Absence) else await self.obtain(source, located)

    def serve(self, source: ObjectSource, name: str = "sql") -> StoredAdapter | None:
        return asyncio.run(self.ask(source, name))

    def assert_clean(self) -> None:
        """Nothing half there: no leftovers, and every published adapter verifies."""
        assert not list(self.store.layout.folder("tmp").iterdir())
        for digest in self.store.layout.digests():
            assert self.store.verify(digest)


def read(stored: StoredAdapter | None) -> dict[str, bytes]:
    assert stored is not None
    return {name: data for name, data in content(stored.directory).items() if name in FILES}


def locate(source: ObjectSource, name: str = "sql", base: str = BASE) -> RemoteAdapter | None:
    found = asyncio.run(source.locate(AdapterName.parse(name), base))
    return None if isinstance(found, Absence) else found
