"""Adapters of the Hugging Face Hub: `org/repo/folder@revision` is a folder of a repository at a commit.

A revision is resolved to a commit first, and that commit is what is fetched and what the store knows the adapter by, so
a branch that moves meanwhile changes nothing. Tokens, LFS and Xet are the business of `huggingface_hub`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TypeVar

import stamina
from huggingface_hub import HfApi, get_token
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.hub.errors import Meaning, is_local, meaning_of, retry_after, unavailable
from lora_plugins.resolvers.sources.hub.files import (
    RepoFile,
    cached_path,
    copy_cached,
    describe_cached,
    discard_scratch,
    download,
    in_own_thread,
)
from lora_plugins.resolvers.sources.hub.patterns import DEFAULT_REVISION, HubPatterns
from lora_plugins.resolvers.sources.source import ADAPTER_FILES, RemoteAdapter, SourceFile, VersionChanged
from lora_plugins.resolvers.uris import SourceUri
from lora_plugins.store.store import PartialDownload

_T = TypeVar("_T")
_LOCATE_TIMEOUT_S = 30.0
_REQUEST_TIMEOUT_S = 10.0
_ATTEMPTS = 4


class HubSource:
    """The repositories of an allow-list.

    What the Hub does not have is no adapter (None): a missing repository, revision or folder, or one without adapter
    files. It does not tell anonymous clients whether a repository is missing or private (401). Where an entry of the
    list names that repository, this is L006, because its operator wants it served and forgot the token; where only
    `org/*` fits, it is None, because anybody can ask for any name of that organisation. With a token the Hub says 404
    in both cases, which is None.

    A renamed repository is followed where an entry names it, and is None under `org/*`: it may have left `org`.
    """

    label = "hub"
    remote = True

    def __init__(
        self,
        patterns: HubPatterns,
        *,
        timeout_s: float,
        executor: Executor | None = None,
        endpoint: str | None = None,
        token: str | bool | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Make the source; nothing is asked yet.

        Args:
            patterns: the repositories that are served.
            timeout_s: deadline of one fetch, retries included; locating has the smaller of this and half a minute.
            executor: where the API is asked; downloads have threads of their own.
            endpoint: the Hub's URL, by default `HF_ENDPOINT` as `huggingface_hub` has read it.
            token: a token, False for none, or None for the Hub's own chain.
            cache_dir: the Hub's cache to read from, by default `HF_HUB_CACHE`.
        """
        self._patterns = patterns
        self._timeout_s = timeout_s
        self._executor = executor
        self._token = token
        self._cache_dir = cache_dir
        self._api = HfApi(endpoint=endpoint, token=token)

    def __str__(self) -> str:
        return f"{self.label} ({self._patterns})"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | None:  # noqa: ARG002
        """Find the adapter's commit and files with one request; a name outside the list costs none.

        Raises:
            AdapterNotFound: weights without a configuration.
            SourceUnavailable: the Hub does not answer or denies, or is offline and its cache lacks the adapter.
        """
        target = self._patterns.match(name)
        if target is None:
            return None
        return await self.locate_repo(target.repo, target.subfolder, target.revision, name, explicit=target.explicit)

    async def locate_uri(self, uri: SourceUri, name: AdapterName, *, explicit: bool = True) -> RemoteAdapter | None:
        """Find what an `hf://` URI names that `AllowedUris.check` has let through; as `locate_repo`."""
        revision = uri.revision or DEFAULT_REVISION
        return await self.locate_repo(uri.repo, uri.subfolder, revision, name, explicit=explicit)

    async def locate_repo(
        self, repo: str, subfolder: str, revision: str, name: AdapterName, *, explicit: bool = True
    ) -> RemoteAdapter | None:
        """Find a folder of a repository at a revision, whatever the list says; raises as `locate`.

        `explicit`: the operator named this repository, so that "missing or private" is an error.
        """
        found = await self._find(repo, subfolder, revision, explicit=explicit)
        if found is None:
            return None
        commit, files = found
        if not files:
            return None
        if not any(file.name == CONFIG_FILE for file in files):
            raise AdapterNotFound(
                "no such file",
                expected="the adapter's configuration",
                remedy="upload the adapter again as PEFT saves it",
                file=CONFIG_FILE,
            )
        return RemoteAdapter(name, self.label, str(SourceUri.hub(repo, subfolder)), commit, files)

    async def fetch(self, located: RemoteAdapter, arriving: PartialDownload) -> None:
        """Get the located files at the located commit, all of them at once.

        Raises:
            VersionChanged: the commit is gone.
            SourceUnavailable: the Hub does not answer or denies, or the deadline has passed.
            OSError: the directory cannot be written.
        """
        uri = SourceUri.parse(located.uri)
        where = f"{uri.repo}@{located.version[:12]}"
        stop = threading.Event()
        files = [
            asyncio.ensure_future(self._fetch(uri, located.version, file, arriving, stop)) for file in located.files
        ]
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await asyncio.gather(*files)
            await asyncio.to_thread(discard_scratch, arriving.directory)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise _too_slow(where, self._timeout_s) from error
            if is_local(error):
                raise  # the store says what its own disk means
            if meaning_of(error) is Meaning.ABSENT:
                raise VersionChanged(
                    f"no {where} any more", expected="the commit that was there", remedy="ask again"
                ) from error
            raise await self._ours(error, where) from error
        finally:
            stop.set()
            for file in files:
                file.cancel()
            await asyncio.gather(*files, return_exceptions=True)

    async def published(self, located: RemoteAdapter, directory: Path) -> None:
        """Nothing to do."""

    async def _find(
        self, repo: str, subfolder: str, revision: str, *, explicit: bool
    ) -> tuple[str, tuple[SourceFile, ...]] | None:
        """The commit and its adapter files in the folder; None where the Hub says that there is no such revision."""
        where = f"{repo}@{revision}"
        timeout_s = min(self._timeout_s, _LOCATE_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                info = await self._retrying(partial(self._in_executor, partial(self._info, repo, revision)))
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise _too_slow(where, timeout_s) from error
            meaning = meaning_of(error)
            if meaning is Meaning.ABSENT or (meaning is Meaning.HIDDEN and not explicit):
                return None
            if meaning is Meaning.OFFLINE:
                cached = await self._in_executor(partial(self._cached, repo, subfolder, revision))
                if cached is not None:
                    return cached
            raise await self._ours(error, where) from error
        if not info.sha or info.siblings is None:
            raise _incomplete(where)
        if info.id != repo and not explicit:
            return None
        return info.sha, _files(info.siblings, subfolder, where)

    async def _fetch(
        self, uri: SourceUri, commit: str, file: SourceFile, arriving: PartialDownload, stop: threading.Event
    ) -> None:
        wanted = RepoFile(uri.repo, commit, _join(uri.subfolder, file.name), file)
        if not await in_own_thread(partial(copy_cached, wanted, arriving.directory, self._cache_dir)):
            get = partial(download, self._api, wanted, arriving.directory, stop)
            await self._retrying(partial(in_own_thread, get))
        arriving.landed(file.name, file.size_bytes)

    def _info(self, repo: str, revision: str) -> ModelInfo:
        timeout_s = min(self._timeout_s, _REQUEST_TIMEOUT_S)
        return self._api.model_info(repo, revision=revision, files_metadata=True, timeout=timeout_s)

    def _cached(self, repo: str, subfolder: str, revision: str) -> tuple[str, tuple[SourceFile, ...]] | None:
        """What the Hub's cache has of it; None where it lacks a part, which the Hub may well have."""
        commit, files = "", []
        for name in ADAPTER_FILES:
            path = _join(subfolder, name)
            found = cached_path(repo, path, revision, self._cache_dir)
            with contextlib.suppress(OSError):
                if found is not None:
                    commit = found.parents[path.count("/")].name  # …/snapshots/<commit>/<path>
                    files.append(describe_cached(found))
        names = [file.name for file in files]
        return (commit, tuple(files)) if CONFIG_FILE in names and len(names) > 1 else None

    async def _in_executor(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _retrying(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat what may help when it is repeated; the caller holds the deadline."""
        async for attempt in stamina.retry_context(
            on=retry_after, attempts=_ATTEMPTS, timeout=None, wait_initial=0.2, wait_max=5.0, wait_jitter=0.5
        ):
            with attempt:
                return await work()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ours(self, error: Exception, where: str) -> LoRAPluginsError:
        if isinstance(error, LoRAPluginsError):
            return error
        token = self._token is not False
        if self._token is None:
            with contextlib.suppress(Exception):  # the error that is being told may be of the token itself
                token = await self._in_executor(get_token) is not None
        return unavailable(error, where, token=token)


def _too_slow(where: str, timeout_s: float) -> SourceUnavailable:
    return SourceUnavailable(
        f"a Hub that has not served {where} in time",
        expected=f"an answer within {timeout_s:g} s",
        remedy="ask again later, or raise LORA_PLUGINS_FETCH_TIMEOUT_S",
    )


def _join(subfolder: str, name: str) -> str:
    return f"{subfolder}/{name}" if subfolder else name


def _files(siblings: list[RepoSibling], subfolder: str, where: str) -> tuple[SourceFile, ...]:
    """The adapter files of one folder.

    Raises:
        SourceUnavailable: the listing has no sizes.
    """
    listed = {sibling.rfilename: sibling for sibling in siblings}
    present = [(name, listed.get(_join(subfolder, name))) for name in ADAPTER_FILES]
    return tuple(_source_file(name, sibling, where) for name, sibling in present if sibling is not None)


def _source_file(name: str, sibling: RepoSibling, where: str) -> SourceFile:
    lfs = sibling.lfs
    size_bytes = sibling.size if sibling.size is not None else lfs.size if lfs is not None else None
    if size_bytes is None:
        raise _incomplete(where)
    sha256 = lfs.sha256 if lfs is not None else ""
    return SourceFile(name, size_bytes, sha256 or sibling.blob_id or "", sha256)  # the ETag that it is served with


def _incomplete(where: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"an answer without commit, files and sizes for {where}", expected="the Hub's API", remedy="check HF_ENDPOINT"
    )
