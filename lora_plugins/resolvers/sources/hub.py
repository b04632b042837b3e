"""The source of adapters on the Hugging Face Hub: `org/repo/folder@revision` is a folder of a repository at a commit.

Called on the event loop of an API server; every call of `huggingface_hub` runs in a thread of its own. `locate`
resolves a revision to a commit with one request; fetches and the store's versions use the commit, so a branch that
moves meanwhile changes nothing. `huggingface_hub` handles tokens, LFS and Xet. Served repositories: `hub_repos.py`; the
download of a file: `hub_files.py`; errors: `hub_failures.py`.

A commit is published if a branch or a tag reaches the commit: only the owner can move these. The Hub also finds commits
of pull requests, which anybody can open, by hash or by other spellings of `refs/pr/7`, so every commit is compared with
branches and tags.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachetools import TTLCache
from huggingface_hub import CacheNotFound, HfApi, constants, get_token, scan_cache_dir
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from lora_plugins.absence import Absence, without_login
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import INDEX_FILE, MAX_INDEX_BYTES, shards_of
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, SourceUnavailable, describing
from lora_plugins.resolvers.sources.hub_failures import map_error
from lora_plugins.resolvers.sources.hub_files import (
    RepoFile,
    cached_path,
    copy_cached,
    describe_cached,
    discard_scratch,
    download_file,
)
from lora_plugins.resolvers.sources.hub_repos import HubPatterns, HubTarget, shown
from lora_plugins.resolvers.sources.remote_failures import FailureKind, RemoteFailure
from lora_plugins.resolvers.sources.retries import Deadline, Retries, deadline, look_up_timeout_s
from lora_plugins.resolvers.sources.source import (
    ADAPTER_FILES,
    OWN_FILES,
    Listing,
    RemoteAdapter,
    SourceFile,
    VersionChanged,
    choose_files,
    needs_shards,
)
from lora_plugins.resolvers.sources.templates import DEFAULT_REVISION
from lora_plugins.resolvers.sources.threads import OwnThreads
from lora_plugins.resolvers.sources.tree import MayLead
from lora_plugins.resolvers.sources.uri import BRANCHES_AND_TAGS, SourceUri
from lora_plugins.settings import Settings
from lora_plugins.store.partial_download import PartialDownload

_T = TypeVar("_T")
_threads = OwnThreads("lora-plugins-hub")
_REQUEST_TIMEOUT_S = 10.0
_ATTEMPTS = 4
_REMEMBERED_COMMITS = 10_000  # published commits that a source remembers
_REMEMBERED_S = 3600.0


def configured(settings: Settings, _: MayLead) -> HubSource:
    """The source of `VLLM_LORA_RESOLVER_HF_REPO_LIST`; the second argument, about symlinks, is for other sources.

    Raises:
        InvalidSettings: a malformed entry of the list, or a server that takes repositories from ModelScope.
    """
    if settings.use_modelscope:
        raise InvalidSettings(
            "VLLM_USE_MODELSCOPE=1 beside VLLM_LORA_RESOLVER_HF_REPO_LIST, repositories of the Hugging Face Hub",
            expected="adapters of ModelScope in a directory",
            remedy="run 'modelscope download --local_dir' into VLLM_LORA_RESOLVER_CACHE_DIR and unset "
            "VLLM_LORA_RESOLVER_HF_REPO_LIST, or unset VLLM_USE_MODELSCOPE",
        )
    return HubSource(HubPatterns.parse(settings.hub_repos), timeout_s=settings.fetch_timeout_s)


class HubSource:
    """The repositories of an allow-list.

    The answer is `Absence` for a missing repository, revision or folder, and for a folder without adapter files. To
    clients without a token the Hub answers 401 for a missing repository and for a private one. Where an entry of the
    list names the repository, 401 is the error L006, because the operator wants the repository served and forgot the
    token; where only `org/*` matches, the answer is absence, because anybody can ask for any name of the organisation.
    With a token the Hub answers 404 for both, which is absence.

    Unpublished commits are absent, unless an entry of the list pins the revision (`hub_repos.py`).

    A renamed repository is followed where an entry names the old name, and is absent under `org/*`: the repository may
    have another owner now.
    """

    label = "hub"
    remote = True

    def __init__(
        self,
        repos: HubPatterns,
        *,
        timeout_s: float,
        endpoint: str | None = None,
        token: str | bool | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Make the source, without any request.

        Args:
            repos: the served repositories.
            timeout_s: the longest silence of a fetch, retries included; locating has `look_up_timeout_s` of the time.
            endpoint: the Hub's URL, by default `HF_ENDPOINT` as `huggingface_hub` has read the variable.
            token: a token, False for none, or None for the Hub's own chain.
            cache_dir: the Hub's cache to read from, by default `HF_HUB_CACHE`.
        """
        self._repos = repos
        self._retries = Retries(timeout_s, _ATTEMPTS, wait_s=0.2)
        self._locating = replace(self._retries, timeout_s=look_up_timeout_s(timeout_s))
        self._token = token
        self._cache_dir = cache_dir
        self._api = HfApi(endpoint=endpoint, token=token)
        # True for each published commit, by repository, requested revision and commit.
        self._published: TTLCache[tuple[str, str, str], bool] = TTLCache(_REMEMBERED_COMMITS, _REMEMBERED_S)

    def __str__(self) -> str:
        return f"{self.label} ({self._repos})"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:  # noqa: ARG002
        """Find the adapter's commit and files with one request; a name outside the list needs no request.

        Raises:
            AdapterNotFound: weights without a configuration.
            SourceUnavailable: the Hub does not answer or denies, or is offline without the adapter in its cache.
        """
        target = self._repos.match(name)
        if isinstance(target, str):  # the reason for which no entry allows the name
            return Absence(self.label, "", target, was_asked=False)
        with describing(place=self._place(target.uri, target.revision)):
            found = await self._find(target)
            if isinstance(found, Absence):
                return found
            return RemoteAdapter(name, self.label, str(target.uri), *found)

    def _place(self, uri: SourceUri, revision: str) -> str:
        return f"{replace(uri, revision=revision)} on {without_login(self._api.endpoint)}"

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Get the located files at the located commit, all files at once.

        Raises:
            VersionChanged: the commit or the repository is gone, or private by now.
            SourceUnavailable: the Hub does not answer or denies, or no byte comes any more.
            OSError: the directory cannot be written.
        """
        uri = SourceUri.parse(adapter.uri)
        with describing(place=self._place(uri, adapter.version)):
            await self._fetch(adapter, uri, download)

    async def _fetch(self, adapter: RemoteAdapter, uri: SourceUri, download: PartialDownload) -> None:
        stop = threading.Event()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with deadline(self._retries.timeout_s) as state:
                for file in adapter.files:
                    repo_file = RepoFile(uri.repo, adapter.version, _join(uri.subfolder, file.name), file)
                    tasks.append(asyncio.create_task(self._fetch_file(repo_file, download, stop, state)))
                await asyncio.gather(*tasks)
            await asyncio.to_thread(discard_scratch, download.directory)
        except (AdapterNotFound, RemoteFailure) as error:
            # Without a token the Hub answers 401 (HIDDEN) also for a repository that was deleted after `locate`. So
            # have the caller locate again: `_find` decides between absence and an error.
            if isinstance(error, RemoteFailure) and error.kind is not FailureKind.HIDDEN:
                raise
            raise VersionChanged(
                f"no {uri.repo}@{adapter.version[:12]} any more",
                expected="the commit that was there",
                remedy="ask again",
            ) from None
        # Wait for every task: a task must not write into a directory that the store removes. `stop` ends a download in
        # a thread, which a cancellation does not reach.
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def probes(self, name: str) -> list[AdapterName]:
        """A name for each entry in the list, with `name` in the place of `*`; none in offline mode."""
        entries = () if constants.HF_HUB_OFFLINE else self._repos.entries
        return [AdapterName("/".join((it.authority, *(it.segments or (name,)))), it.revision) for it in entries]

    async def names(self, base_model_name: str) -> Listing:  # noqa: ARG002
        """The adapters in repositories that the list names; `org/*` entries are not listed.

        In offline mode, the adapters that the Hub's cache has whole, also those of `org/*` entries.
        """
        if constants.HF_HUB_OFFLINE:
            cached = await self._call(lambda: sorted(self._cached_names()), "names")
            return Listing(tuple(cached), ("offline: only what the Hub's cache has",))
        names: set[str] = set()
        gaps, end = [], f"/{CONFIG_FILE}"
        for entry in self._repos.entries:
            if not entry.segments:  # `org/*`
                gaps.append(f"{shown(entry)}: all of an owner's repositories")
                continue
            target = HubTarget(replace(entry, revision=None), entry.revision or DEFAULT_REVISION, explicit=True)
            try:
                info = await self._call(partial(self._info, target), str(target))
            except LoRAPluginsError as error:
                gaps.append(f"{target}: {error.found}")
                continue
            files = [file.rfilename for file in info.siblings or ()]
            # The whole subfolder, at any depth: each folder with a configuration is an adapter.
            below = [f"{target.uri.repo}/{file}" for file in files if file.startswith(_join(target.uri.subfolder, ""))]
            names.update(file.removesuffix(end) for file in below if file.endswith(end))
        return Listing(tuple(sorted(names)), tuple(gaps))

    async def _find(self, target: HubTarget) -> tuple[str, tuple[SourceFile, ...]] | Absence:
        """The commit, and the adapter files in the folder at the commit.

        Raises:
            SourceUnavailable: as `locate`.
        """
        where = str(target)
        place = self._place(target.uri, target.revision)
        try:
            async with deadline(self._locating.timeout_s, f"an answer of the Hub for {where}") as state:
                info = await self._locating.run(lambda: self._call(partial(self._info, target), where), state)
                # Only after `_info` has answered: a name that the Hub does not have needs no second request.
                is_unpublished = not await self._is_published(target, info.sha or "", state)
        except AdapterNotFound as error:
            return Absence(self.label, place, error.found)
        except RemoteFailure as error:
            if error.kind is FailureKind.HIDDEN and not target.explicit:
                return Absence(self.label, place, error.found, error.remedy)
            # Offline mode reads the cache. Without offline mode, the Hub's answer counts, and not an old cache.
            cached = await asyncio.to_thread(self._cached, target) if error.kind is FailureKind.OFFLINE else None
            if cached is None:
                raise
            return cached
        if not info.sha or info.siblings is None:
            raise _incomplete(where)
        # The Hub answers for the new name of a renamed repository without saying so.
        if info.id != target.uri.repo and not target.explicit:
            detail = f"a repository that is now called {info.id}"
            return Absence(self.label, place, detail, "name the repository itself in the list")
        if is_unpublished:
            detail = f"a commit that no branch or tag reaches, {info.sha[:12]}"
            return Absence(self.label, place, detail, "pin this very revision in the list")
        files = _files(info.siblings, target.uri.subfolder, where)
        if not files:
            where_in_repo = "in this folder" if target.uri.subfolder else "at its root"
            return Absence(self.label, place, f"a repository without adapter files {where_in_repo}")
        return info.sha, files

    async def _is_published(self, target: HubTarget, commit: str, state: Deadline) -> bool:
        """Whether the owner has published the commit; a positive answer is remembered for an hour."""
        key = (target.uri.repo, target.revision, commit)
        # `main` and spelled-out branches and tags are the owner's; a pinned revision is the operator's choice.
        is_own = target.revision == DEFAULT_REVISION or target.revision.startswith(BRANCHES_AND_TAGS)
        if is_own or target.is_pinned or key in self._published:
            return True
        ask = partial(_reaches, self._api, target, commit)
        if not await self._locating.run(lambda: self._call(ask, str(target)), state):
            return False
        # A negative answer is not remembered: a branch or a tag may reach the commit at any moment.
        self._published[key] = True
        return True

    async def _fetch_file(
        self, file: RepoFile, download: PartialDownload, stop: threading.Event, state: Deadline
    ) -> None:
        """Copy one file from the Hub's cache, or else download the file."""
        where = f"{file.repo}@{file.commit[:12]}"
        directory = download.directory
        progressed = state.progressed_in_thread()
        if not await self._call(partial(copy_cached, file, directory, self._cache_dir, progressed), where):
            get = partial(download_file, self._api, file, directory, stop, progressed)
            await self._retries.run(lambda: self._call(get, where), state)
        download.landed(file.source.name, file.source.size_bytes)

    async def _call(self, work: Callable[[], _T], where: str) -> _T:
        """Call `huggingface_hub` in a thread, as it blocks and cannot be interrupted, and map its errors."""

        def run() -> _T:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - the boundary to the library: every error is mapped
                raise map_error(error, where, has_token=self._has_token()) from None

        return await asyncio.get_running_loop().run_in_executor(_threads, run)

    def _has_token(self) -> bool:
        if self._token is None:
            with contextlib.suppress(Exception):  # the reported error may itself be about the token
                return get_token() is not None
        return self._token is not False

    def _info(self, target: HubTarget) -> ModelInfo:
        # A third of the look-up's time, so that retries fit in; at least 10 s, but never more than the look-up has.
        locate_s = self._locating.timeout_s
        timeout_s = min(locate_s, max(_REQUEST_TIMEOUT_S, locate_s / 3))
        return self._api.model_info(target.uri.repo, revision=target.revision, files_metadata=True, timeout=timeout_s)

    def _cached_names(self) -> Iterator[str]:
        """The names of served adapters that the Hub's cache has whole."""
        with contextlib.suppress(CacheNotFound):
            repos = [repo for repo in scan_cache_dir(self._cache_dir).repos if repo.repo_type == "model"]
            folders = {
                "/".join((repo.repo_id, *file.file_path.relative_to(revision.snapshot_path).parts[:-1]))
                for repo in repos
                for revision in repo.revisions
                for file in revision.files
                if file.file_name == CONFIG_FILE
            }
            for name in folders:
                with contextlib.suppress(AdapterNotFound):  # a folder that no name can stand for
                    target = self._repos.match(AdapterName.parse(name))
                    if isinstance(target, HubTarget) and self._cached(target) is not None:
                        yield name

    def _cached(self, target: HubTarget) -> tuple[str, tuple[SourceFile, ...]] | None:
        """The commit and files of an adapter in the Hub's cache; None where the cache does not have the adapter whole.

        The cache may lack files that the Hub has: those were never downloaded.
        """

        def cached(names: Iterable[str]) -> dict[str, Path]:
            paths = {name: _join(target.uri.subfolder, name) for name in names}
            found = {it: cached_path(target.uri.repo, at, target.revision, self._cache_dir) for it, at in paths.items()}
            return {name: path for name, path in found.items() if path is not None}

        found, shards = cached(ADAPTER_FILES), list[str]()
        if needs_shards(found):
            with contextlib.suppress(OSError), found[INDEX_FILE].open("rb") as index:
                shards = shards_of(index.read(MAX_INDEX_BYTES + 1))
            found |= cached(shards)
        files: dict[str, SourceFile] = {}
        for name, path in found.items():
            with contextlib.suppress(OSError):  # a file for chats that cannot be read is left out
                files[name] = describe_cached(path, name)
        # `OWN_FILES` are the configuration and files of weights: more than one means weights beside a configuration.
        has_weights = len(files.keys() & set(OWN_FILES)) > 1
        if CONFIG_FILE not in files or not has_weights or not files.keys() >= set(shards):
            return None
        # …/snapshots/<commit>/<subfolder>/adapter_config.json
        return found[CONFIG_FILE].parents[len(target.uri.segments) - 1].name, tuple(files.values())


def _join(subfolder: str, name: str) -> str:
    """The path of a file in a repository; for an empty `name`, the beginning that all paths in the subfolder have."""
    return f"{subfolder}/{name}" if subfolder else name


def _files(siblings: list[RepoSibling], subfolder: str, where: str) -> tuple[SourceFile, ...]:
    """The adapter files of one folder.

    Raises:
        SourceUnavailable: the listing has no sizes.
    """
    listed = {sibling.rfilename: sibling for sibling in siblings}
    beside = [name.removeprefix(_join(subfolder, "")) for name in listed if name.startswith(_join(subfolder, ""))]
    return tuple(_source_file(name, listed[_join(subfolder, name)], where) for name in choose_files(beside))


def _source_file(name: str, sibling: RepoSibling, where: str) -> SourceFile:
    lfs = sibling.lfs
    size_bytes = sibling.size if sibling.size is not None else lfs.size if lfs is not None else None
    if size_bytes is None:
        raise _incomplete(where)
    sha256 = lfs.sha256 if lfs is not None else ""
    # The Hub's ETag is the SHA-256 for a file in LFS, and the id of git's blob for any other file.
    return SourceFile(name, size_bytes, sha256 or sibling.blob_id or "", sha256)


def _incomplete(where: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"an answer without commit, files and sizes for {where}", expected="the Hub's API", remedy="check HF_ENDPOINT"
    )


def _reaches(api: HfApi, target: HubTarget, commit: str) -> bool:
    """Whether a branch or tag reaches the commit that the Hub has found for the target.

    One request for branches and tags; one more for the whole history of each, only where none has `commit` as newest.

    Raises:
        Exception: any error of `huggingface_hub`.
    """
    refs = api.list_repo_refs(target.uri.repo)
    own = [*refs.branches, *refs.tags]
    if any(commit == ref.target_commit for ref in own):
        return True
    reached: set[str] = set()
    for ref in own:
        # A branch or tag whose newest commit is in a history read before adds nothing.
        if ref.target_commit not in reached:
            reached.update(
                made.commit_id for made in api.list_repo_commits(target.uri.repo, revision=ref.target_commit)
            )
            if commit in reached:
                return True
    return False
