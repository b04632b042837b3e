"""A local Hub, sources of it, and a store to fetch into; what the tests of the Hub source share."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from lora_plugins.absence import Absence
from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.api.push_forms import is_of_adapter
from lora_plugins.resolvers.sources.hub import HubSource
from lora_plugins.resolvers.sources.hub_repos import HubPatterns
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import Settings
from lora_plugins.store.store import Store, StoredAdapter
from lora_plugins.verification.protocol import ReadAdapter
from testbed.hub import Hub
from tests.make import adapter_files, content

FILES = adapter_files()
OTHER = adapter_files(lora_alpha=16)


class Bed:
    """One test's Hub, its own empty Hub cache, and its own store."""

    def __init__(self, hub: Hub, root: Path) -> None:
        self.hub = hub
        self.cache = root / "hub-cache"
        self.root = root / "store"
        self.store = Store(self.root)

    def source(self, entries: str = "team/sql, team/secret, acme/*", **more) -> HubSource:
        more = {"timeout_s": 120, "endpoint": self.hub.url, "cache_dir": self.cache, **more}
        return HubSource(HubPatterns.parse(entries), **more)

    def locate(self, name: str, **more) -> RemoteAdapter | None:
        found = self.ask(name, **more)
        return None if isinstance(found, Absence) else found

    def ask(self, name: str, **more) -> RemoteAdapter | Absence:
        return asyncio.run(self.source(**more).locate(AdapterName.parse(name), "org/base"))

    def obtain(self, source: HubSource, located: RemoteAdapter) -> StoredAdapter:
        return asyncio.run(self.store.obtain(located, lambda arriving: source.fetch(located, arriving), check))

    def serve(self, name: str, **more) -> dict[str, bytes]:
        """Locate and fetch; the bytes that an engine would read."""
        source = self.source(**more)

        async def go() -> StoredAdapter:
            located = await source.locate(AdapterName.parse(name), "org/base")
            assert not isinstance(located, Absence)
            return await self.store.obtain(located, lambda arriving: source.fetch(located, arriving), check)

        return content(asyncio.run(go()).directory)

    def leftovers(self) -> list[Path]:
        """What lies in the store unfinished, once the threads that nobody waits for any more have ended."""
        wait_for_threads()
        return list(self.store.layout.folder("tmp").rglob("*"))


def wait_for_threads() -> None:
    """Until the threads of downloads have ended."""
    deadline = time.monotonic() + 120
    while any(thread.name == "lora-plugins-hub" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check(directory: Path) -> ReadAdapter:
    # Nothing but the adapter's own files is ever published.
    files = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()]
    assert all(is_of_adapter(name) and not (directory / name).is_symlink() for name in files)
    verified = verify_adapter(directory, None, Settings())
    return ReadAdapter(verified, canonical_bytes(verified.config))


def isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Nothing of this machine's own Hub settings."""
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "not-given"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
