"""The source of adapters in object stores: S3, and every other store with a URL of fsspec.

Called on the event loop of an API server; all network I/O runs on fsspec's loop thread, and calls of synchronous file
systems in further threads. `S3_PATH_TEMPLATE` gives an adapter's directory,
`s3://bucket/loras/{base_model_name}/{lora_name}`; one LIST (S3, `s3.py`) or one look per file (others, `fsspec.py`)
locates the adapter, and parallel ranges fetch the files together (`ranges.py`).

Checks of the bytes: every range's length and place, the located ETag of every range, and the MD5 of S3 objects whose
ETag is an MD5. ETags of multipart uploads and of directory buckets are no MD5; there the checksum of the whole object
counts, where S3 keeps one. Other objects, and those encrypted with a KMS or customer key, get only the check of lengths
here, and the adapter verifier's checks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from lora_plugins.absence import Absence, without_login
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import LoRAPluginsError, describing
from lora_plugins.resolvers.sources.fsspec import FsspecFiles
from lora_plugins.resolvers.sources.ranges import DownloadLimits, download_ranges
from lora_plugins.resolvers.sources.remote_failures import FailureKind, RemoteFailure, map_error
from lora_plugins.resolvers.sources.retries import Retries, deadline, look_up_timeout_s
from lora_plugins.resolvers.sources.s3 import S3Files, s3_storage_options
from lora_plugins.resolvers.sources.source import Listing, RemoteAdapter, VersionChanged, version_of
from lora_plugins.resolvers.sources.templates import LocalLink, Template, parse_local
from lora_plugins.resolvers.sources.tree import MayLead
from lora_plugins.resolvers.sources.uri import ACCESS_POINT, ARN_PREFIX, split_access_point, split_bucket
from lora_plugins.settings import Settings
from lora_plugins.store.partial_download import PartialDownload

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(/.*)", re.DOTALL)
_VARIABLE = "S3_PATH_TEMPLATE"
# Local directories have their own resolver, which knows about symlinks and mounts.
_NOT_REMOTE = frozenset({"file", "local", "hf"})
_WEB = frozenset({"http", "https"})
_LOCATE_ATTEMPTS = 3
_HOW_READ = f"; {_VARIABLE} without a scheme is read as s3://"
_NEVER_READ_AGAIN = (
    "set a new one and restart the server; a server without AWS_ACCESS_KEY_ID in its environment reads renewed "
    "credentials again, of AWS_SHARED_CREDENTIALS_FILE or AWS_PROFILE"
)

T = TypeVar("T")


def configured(settings: Settings, _: MayLead) -> ObjectSource:
    """The source of `S3_PATH_TEMPLATE`; raises what `object_source` raises."""
    return object_source(settings.s3_path_template or "", settings)


def object_source(template: str, settings: Settings) -> ObjectSource:
    """The source of a template as `S3_PATH_TEMPLATE`, with the `AWS_*` variables.

    Raises:
        InvalidSettings: a malformed template or variable, or a missing package.
    """
    protocol, url = _split(template)
    options = None
    # Half of the look-up's time for one answer, so that a retry fits in.
    if protocol == "s3":
        answer_s = look_up_timeout_s(settings.fetch_timeout_s) / 2
        options = s3_storage_options(settings.aws, split_bucket(url)[0], answer_s=answer_s)
    return ObjectSource(
        template,
        local_template=settings.local_path_template,
        storage_options=options,
        limits=DownloadLimits(settings.fetch_timeout_s),
        check_md5=settings.check_md5,
    )


class ObjectSource:
    """Adapters below a URL template, see `templates.Template`; a template without a scheme is an S3 path.

    Args:
        template: the adapter's directory; scheme and bucket or host must be fixed.
        local_template: absolute path to make a symlink to the published directory.
        storage_options: of the fsspec file system; for S3 see `s3_storage_options`.
        limits: range size, ranges in flight, deadline and retries of one fetch.
        locate_timeout_s: deadline of one `locate`, retries included; by default derived from a fetch's deadline.
        check_md5: compare S3 objects with ETags that look like an MD5, or with their checksums.

    Raises:
        InvalidSettings: a malformed template, or a protocol without an installed package.
    """

    remote = True
    setting = "s3"  # in LORA_PLUGINS_SOURCES, whatever the scheme

    def __init__(
        self,
        template: str,
        *,
        local_template: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        limits: DownloadLimits | None = None,
        locate_timeout_s: float | None = None,
        check_md5: bool = True,
    ) -> None:
        protocol, url = _split(template)
        self.label = protocol
        self._is_bare = "://" not in template
        self._template = Template(url, _VARIABLE)
        self._quoted = protocol in _WEB
        self._local = parse_local(local_template) if local_template else None
        options = storage_options or {}
        self._files = S3Files(options) if protocol == "s3" else FsspecFiles(protocol, options)
        self._limits = limits or DownloadLimits()
        self._check_md5 = check_md5
        timeout_s = look_up_timeout_s(self._limits.timeout_s) if locate_timeout_s is None else locate_timeout_s
        self._locating = Retries(timeout_s, _LOCATE_ATTEMPTS, self._limits.wait_s, self._limits.max_wait_s)
        # Shared by all fetches of this source, to bound their memory together; used on fsspec's loop only.
        self._turns = asyncio.Semaphore(self._limits.parallel)

    def __str__(self) -> str:
        return f"{self.label} ({without_login(self._template.text)})"

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """Find the adapter's files by one LIST, or one look at each file; see `Source` for errors."""
        uri = self._template.fill(name, base_model_name, quoted=self._quoted)
        with describing(place=self._place(uri)):
            files = await on_loop(get_loop(), self._ask(lambda: self._files.find(uri)))
        if not files:
            return Absence(self.label, self._place(uri), "no adapter_config.json and no weights")
        local = self._local
        link = LocalLink(local.folder, local.fill(name, base_model_name)) if local is not None else None
        with describing(place=self._place(uri)):
            return RemoteAdapter(name, self.label, uri, version_of(files), tuple(files), link)

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Download the located files in parallel ranges.

        Raises:
            VersionChanged: an object changed or vanished since `locate`.
            SourceUnavailable: an object cannot be had, or arrived twice with another checksum.
            OSError: the disk refuses.
        """
        with describing(place=self._place(adapter.uri)):
            try:
                await on_loop(get_loop(), self._fetch(adapter, download))
            except RemoteFailure as error:
                self._note(error)
                raise

    def _place(self, uri: str) -> str:
        endpoint = self._files.endpoint
        return f"{without_login(uri)}/" + (f" on {without_login(endpoint)}" if endpoint else "")

    async def names(self, base_model_name: str) -> Listing:
        """The adapters below the template's fixed beginning, by listing everything; web servers cannot be listed.

        Raises:
            SourceUnavailable: the store does not answer, or does not let these credentials list.
        """
        if self._quoted:
            return Listing((), ("a web server does not list what it has",))
        # Each base model has its own folder, so without a base model there is no folder to list.
        if self._template.has_base and not base_model_name:
            return Listing((), (f"{self._template.text} needs --base-model",))
        names = await on_loop(get_loop(), self._names(base_model_name))
        return Listing(tuple(sorted(names)))

    async def _names(self, base_model_name: str) -> set[str]:
        """Runs on fsspec's loop."""
        below = self._template.folder.removesuffix("/")
        end = f"/{CONFIG_FILE}"
        listed = await self._ask(lambda: self._files.list_below(below))
        names = (self._template.read(uri.removesuffix(end), base_model_name) for uri in listed if uri.endswith(end))
        return {str(name) for name in names if name is not None}

    async def _fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Runs on fsspec's loop."""
        checked = adapter.files if self._check_md5 else ()
        reader = await self._ask(lambda: self._files.reader(adapter.uri, checked))
        await download_ranges(adapter.files, reader, download, turns=self._turns, limits=self._limits)
        # Stores without ETags in answers may have changed during the fetch: look again.
        again = await self._ask(lambda: self._files.find(adapter.uri)) if self._files.rechecks else adapter.files
        if not set(adapter.files) <= set(again):
            raise VersionChanged("other files than before", expected="the located ones", remedy="ask again")

    def _note(self, error: LoRAPluginsError) -> None:
        """Have credentials that are no longer good read again; name the variable at fault, and a web server as one."""
        if not isinstance(error, RemoteFailure):
            return
        if error.kind in (FailureKind.EXPIRED, FailureKind.WRONG_KEY) and isinstance(self._files, S3Files):
            self._files.forget_credentials()
            if self._files.has_static_token and error.kind is FailureKind.EXPIRED:
                error.found = error.found.replace("credentials that have", "an AWS_SESSION_TOKEN that has")
                error.remedy = _NEVER_READ_AGAIN
        elif self._is_bare and _HOW_READ not in error.remedy:
            error.remedy += _HOW_READ
        elif self._quoted:
            error.found = error.found.replace("an object store", "a web server")
            if error.kind in (FailureKind.DENIED, FailureKind.REFUSED):  # no credentials, no bucket
                error.remedy = "check the URL, and that the server may read there"

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to `ask`, with retries and a deadline, and with errors of this package."""

        async def mapped() -> T:
            try:
                return await ask()
            except Exception as error:  # noqa: BLE001 - the boundary to the libraries: every error is mapped
                mapped = map_error(error)
                self._note(mapped)
                raise mapped from None

        async with deadline(self._locating.timeout_s) as state:
            return await self._locating.run(mapped, state)


def _split(template: str) -> tuple[str, str]:
    """The protocol and the whole URL of a template with a fixed bucket or host.

    Raises:
        InvalidSettings: the template has another form.
    """
    known = Template(template, _VARIABLE)
    url = template.rstrip("/")
    if "://" not in url:
        url = "s3://" + url
    match = _URL.fullmatch(url)
    if match is None or not match[2]:
        raise known.wrong("no URL of one bucket or host")
    protocol, place, path = match[1].lower(), match[2], match[3]
    if protocol in ("s3", "s3a") and place.startswith(ARN_PREFIX):
        found = split_access_point(place + path)
        if found is None or not found[1]:
            raise known.wrong(f"an ARN that is no access point's ({ACCESS_POINT}), or without a path,")
        place, path = found[0], f"/{found[1]}"
    elif "::" in url or (":" in place and "://" not in template):
        raise known.wrong("no URL of one bucket or host" if "::" in url else "a scheme without '://'")
    if "{" in place or "}" in place:
        raise known.wrong("a placeholder in the bucket or host")
    # These protocols would pass by the checks of symlinks, and of allowed repositories.
    if protocol in _NOT_REMOTE:
        raise known.wrong(f"the protocol {protocol}://, which has a resolver of its own")
    if protocol == "s3a":
        protocol = "s3"
    if ":" in place.rpartition("@")[0] or (protocol in _WEB and ("@" in place or "?" in path or "#" in path)):
        raise known.wrong("a login, query or fragment")
    return protocol, f"{protocol}://{place}{path}"


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` on another thread's event loop; a cancellation raises only after the end of the work."""
    started: list[asyncio.Task[Any] | None] = []

    async def run() -> T:
        started.append(asyncio.current_task())
        return await work

    waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # One step of the loop after the start, which may still be in the loop's queue.
        loop.call_soon_threadsafe(loop.call_soon, lambda: [task.cancel() for task in started if task is not None])
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # read the error: asyncio logs errors that nobody reads
        raise
