"""Fetches an adapter to this machine where its directory is missing: on another node, or deleted.

A worker on another node than the API server gets a path that exists only there. The last part of a path in our store is
the digest of the adapter's bytes; the adapter's name, or the URI that it was loaded by, names the source. So the worker
asks the source as the API server did, and serves the answer only if the bytes have the same digest.

The fetching thread of `worker/jobs.py` calls `fetch`, which may take minutes. `fetch` returns a directory of this
machine's store, leased until the loading thread has read the directory and calls `release`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.store.layout import is_digest
from lora_plugins.store.store import Store


class Resolved(Protocol):
    """An adapter in this machine's store."""

    @property
    def path(self) -> Path: ...


class Resolver(Protocol):
    """The resolver of this process (`AdapterResolver`)."""

    async def latest(self, name: str, uri: str | None, base_path: str) -> Resolved | None:
        """Return the newest version of a name or URI, fetched and leased; None where no source has the name."""

    @property
    def store(self) -> Store:
        """This machine's store."""


class MissingFilesFetcher:
    """Finds or fetches the directory of a path, in a single thread, which may wait.

    Args:
        base_path: the served model's path or Hub id.
        make_resolver: called at the first use; returns None without sources.
    """

    def __init__(self, base_path: str, make_resolver: Callable[[], Resolver | None]) -> None:
        self._base_path = base_path
        self._make_resolver = make_resolver
        self._runner: asyncio.Runner | None = None
        self._resolver: Resolver | None = None
        self._unread: Counter[tuple[str, str]] = Counter()  # fetches whose files are still to be read, by name and path
        self._lock = threading.Lock()

    def is_here(self, path: str) -> bool:
        """Whether the directory can be read as it is."""
        return os.path.isdir(path)

    def fetch(self, name: str, path: str, uri: str | None = None) -> str:
        """Return a directory on this machine with the bytes that `path` stands for.

        Args:
            name: the adapter's name.
            path: the API server's directory.
            uri: the URI that the API server loaded the adapter by, where there was one.

        Raises:
            AdapterNotFound: no source has the adapter any more, or the path is none of a store's.
            InvalidAdapter: the URI is not allowed in this process.
            SourceUnavailable: the sources have other bytes by now, or are unavailable.
            LoRAPluginsError: the sources' adapter cannot be served.
        """
        digest = Path(path).name
        # One event loop for all calls: the sources' connections belong to the loop that opened them.
        if self._runner is None:
            self._runner, self._resolver = asyncio.Runner(), self._make_resolver()
        if self._resolver is None or not is_digest(digest):
            raise AdapterNotFound(
                "no such directory in this worker",
                expected="the adapter's files on every node, or a resolver of lora-plugins that finds it",
                remedy="share the directory among the nodes, or name a resolver in VLLM_PLUGINS",
            )
        found = self._resolver.store.acquire_sound(digest, name)
        if found is None:
            # `latest`, not the resolver's memory: the API server may have just taken up a new version.
            resolved = self._runner.run(self._resolver.latest(name, uri, self._base_path))
            if resolved is None:
                raise AdapterNotFound(
                    "no such adapter at any source of this worker",
                    expected=f"the one with digest {digest[:12]}, which the API server has",
                    remedy="put it back, or give the workers the API server's settings",
                )
            found = resolved.path
            if found.name != digest:
                # `latest` has leased the wrong version: end the lease, or the store could never remove the version.
                self._resolver.store.release(name, found)
                raise SourceUnavailable(
                    f"another version at the source (digest {found.name[:12]})",
                    expected=f"digest {digest[:12]}, which the API server has",
                    remedy="ask again once the API server has seen the new version, or pin a revision",
                )
        with self._lock:
            self._unread[name, str(found)] += 1
        return str(found)

    def release(self, name: str, path: str) -> None:
        """End the lease of a path that `fetch` returned for a name, after reading; callable from any thread."""
        with self._lock:
            fetches = self._unread.pop((name, path), 0)
            if fetches > 1:  # a second fetch is still to be read
                self._unread[name, path] = fetches - 1
            elif fetches and self._resolver is not None:
                self._resolver.store.release(name, path)
