"""Any fsspec file system for `object_store.py`: `gs://`, `abfs://`, `http(s)://`, `memory://` and others.

Runs on fsspec's loop thread of an API server; calls of a synchronous file system run in threads of the source's own. In
go URLs; out come an adapter's files with sizes and identities, and a reader of ranges of the files.

Files are asked for one by one (`info`), never by a pattern. HTTP bodies stream to disk with `If-Match`. Other file
systems read ranges in pieces of `PIECE_BYTES`, and the source compares sizes and identities once more at the end.

Redirects are followed inside one origin only. The operator has named only the origin; a redirect could lead to a
machine that only this server reaches, and would pass on headers that are meant for the origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cache, partial
from http import HTTPStatus
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, NamedTuple

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.config import conf

from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.adapter.weight_files import INDEX_FILE, check_index_size, shards_of
from lora_plugins.errors import InvalidSettings, SourceUnavailable
from lora_plugins.plugin_names import how_to_install
from lora_plugins.resolvers.sources.ranges import RangeReader, Write
from lora_plugins.resolvers.sources.remote_failures import (
    BrokenAnswer,
    FailureKind,
    HttpStatus,
    ObjectChanged,
    diagnose,
    retry_after,
)
from lora_plugins.resolvers.sources.source import ADAPTER_FILES, OWN_FILES, SourceFile, needs_shards
from lora_plugins.resolvers.sources.threads import OwnThreads

PIECE_BYTES = 2 << 20
BUFFER_BYTES = 256 << 10
_PIECE_TIMEOUT_S = 60.0
_LISTED_AT_ONCE = 16  # folders
_THREADS = 8
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# Keys of an object's identity in answers of file systems, best first.
_IDENTITIES = (
    *("ETag", "etag", "e_tag", "generation", "md5Hash", "md5", "content_md5", "checksum"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "modified", "created"),
)


class FsspecFiles:
    """Lists and reads adapters through one fsspec file system; every method runs on fsspec's loop.

    Raises:
        InvalidSettings: fsspec knows no such protocol, or its package is not installed.
    """

    def __init__(self, protocol: str, storage_options: Mapping[str, Any]) -> None:
        check_protocol(protocol, storage_options)
        self._web = protocol in ("http", "https")
        # On the web every answer has an ETag to compare; elsewhere only a second look finds a change.
        self.rechecks = not self._web
        self._protocol = protocol
        # fsspec would answer from a cache of listings, and never see a new version.
        self._options = {"use_listings_cache": False, **storage_options}
        if self._web:
            self._options.setdefault("encoded", True)  # URLs are quoted once, by the template
            of_operator = self._options.get("client_kwargs") or conf.get(protocol, {}).get("client_kwargs", {})
            checks = [*of_operator.get("trace_configs", ()), _staying()]
            self._options["client_kwargs"] = {**of_operator, "trace_configs": checks}
        self._filesystem: Any = None
        self._opening = asyncio.Lock()
        # Of this source alone: a synchronous file system that hangs blocks no other source.
        self._threads = OwnThreads("lora-plugins-fsspec", _THREADS)
        self.endpoint = ""  # URLs have their own

    async def find(self, uri: str) -> list[SourceFile]:
        """The adapter files directly below `uri`."""
        found = await self._describe_all(uri, ADAPTER_FILES)
        if needs_shards([file.name for file in found]):
            (index,) = (file for file in found if file.name == INDEX_FILE)
            found += await self._describe_all(uri, shards_of(await self._read(uri, index)))
        return found if any(file.name in OWN_FILES for file in found) else []

    async def list_below(self, uri: str) -> list[str]:
        """The URIs of all files below `uri`, folder by folder: fsspec's `find` leaves out folders without access."""
        found: list[str] = []
        folders = [uri]
        while folders:
            asked, folders = folders[:_LISTED_AT_ONCE], folders[_LISTED_AT_ONCE:]
            for children in await asyncio.gather(*map(self._children, asked)):
                found += (child for child, is_folder in children.items() if not is_folder)
                folders += (child for child, is_folder in children.items() if is_folder)
        return found

    async def _children(self, uri: str) -> dict[str, bool]:
        """The URIs directly below `uri`, each with whether a folder is there."""
        path = _path(await self._open(), uri)
        try:
            found = await self._ask("ls", path, detail=True)
        except FileNotFoundError:
            return {}
        is_folder = {str(item["name"]).rstrip("/"): item.get("type") == "directory" for item in found}
        is_folder.pop(path.rstrip("/"), None)  # some stores list an object for the folder itself
        return {f"{uri}/{name.rpartition('/')[2]}": value for name, value in is_folder.items()}

    async def _describe_all(self, uri: str, names: Iterable[str]) -> list[SourceFile]:
        found = await asyncio.gather(*(self._describe(uri, name) for name in names))
        return [file for file in found if file is not None]

    async def _read(self, uri: str, file: SourceFile) -> bytes:
        """Read an index, and no more bytes than the index had when located."""
        check_index_size(file.size_bytes)
        # A reader checks every answer against the located size: a server may send more than it has said.
        data = bytearray()
        reader = await self.reader(uri, ())
        await reader.read(file, 0, file.size_bytes, data.extend)
        return bytes(data)

    async def reader(self, uri: str, checked: Iterable[SourceFile]) -> RangeReader:  # noqa: ARG002 - only S3 has any
        """A reader of the files below `uri`, without checksums."""
        return RangeReader(partial(self._read_web if self._web else self._read_pieces, uri))

    async def _read_pieces(self, uri: str, file: SourceFile, start: int, end: int, write: Write) -> None:
        """Read a range by `cat_file`, with one piece in memory at a time.

        A thread that hangs is left alone, and what it reads later is not written.
        """
        filesystem = await self._open()
        path = _path(filesystem, f"{uri}/{file.name}")
        for at in range(start, end, PIECE_BYTES):
            upto = min(end, at + PIECE_BYTES)
            async with asyncio.timeout(_PIECE_TIMEOUT_S if isinstance(filesystem, AsyncFileSystem) else None):
                data = await self._ask("cat_file", path, start=at, end=upto)
            if len(data) != upto - at:
                raise BrokenAnswer("a piece of another length")
            write(data)

    async def _read_web(self, uri: str, file: SourceFile, start: int, end: int, write: Write) -> None:
        """Stream a range over fsspec's own aiohttp session, with the session's headers and logins."""
        import aiohttp

        filesystem = await self._open()
        options = dict(filesystem.kwargs)
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if file.etag.startswith('"'):  # a strong ETag; `If-Match` never matches a weak one
            headers["If-Match"] = file.etag
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=15))
        session = await filesystem.set_session()
        url = _path(filesystem, f"{uri}/{file.name}")
        async with session.get(url, headers=headers, **options) as answer:
            if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise HttpStatus(answer.status, "", retry_after(answer.headers.get("Retry-After")))
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            place, pieces = answer.headers.get("Content-Range"), answer.content.iter_chunked(BUFFER_BYTES)
            await write_range(file, start, end, write, Answer(answer.status, version, place, pieces))

    async def _open(self) -> Any:
        async with self._opening:
            if self._filesystem is None:
                # Some clients connect as they are made, such as those of FTP and SFTP, and wait for an answer.
                make = partial(fsspec.filesystem, self._protocol, **self._options)
                self._filesystem = await asyncio.get_running_loop().run_in_executor(self._threads, make)
            return self._filesystem

    async def _ask(self, call: str, path: str, **options: Any) -> Any:
        """The file system's answer to a call: by the call's coroutine where the file system has one, or in a thread."""
        filesystem = await self._open()
        if isinstance(filesystem, AsyncFileSystem):
            # fsspec documents the calls with an underscore for callers on its loop.
            return await getattr(filesystem, f"_{call}")(path, **options)
        work = partial(getattr(filesystem, call), path, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _describe(self, uri: str, name: str) -> SourceFile | None:
        try:
            info = await self._ask("info", _path(await self._open(), f"{uri}/{name}"))
        except Exception as error:
            # File systems differ in the error for a missing file; the diagnosis knows them.
            kind = diagnose(error).kind
            if kind is FailureKind.MISSING or (kind is FailureKind.DENIED and name in CHAT_FILES):
                return None
            raise
        if info.get("type", "file") != "file":
            return None
        size_bytes = info.get("size")
        identity = next((str(info[key]) for key in _IDENTITIES if info.get(key)), "")
        # Without an identity, two versions of one size could not be told apart.
        if size_bytes is None or not identity:
            raise SourceUnavailable(
                "an answer without " + ("a size" if size_bytes is None else "an ETag or a time of change"),
                expected="both, to tell one version of an adapter from the next",
                remedy="serve adapters from a server that says them",
                file=name,
            )
        return SourceFile(name, int(size_bytes), identity)


def check_protocol(protocol: str, options: Iterable[str] = ()) -> None:
    """Check that fsspec can make a client for `protocol` with these options.

    Raises:
        InvalidSettings: fsspec knows no such protocol, its package is not installed, or its client needs more options.
    """
    try:
        client = fsspec.get_filesystem_class(protocol)
        if protocol == "s3":
            import_module("awscrt")  # for checksums, and for the signatures of multi-region access points
    except (ValueError, ImportError) as error:
        raise InvalidSettings(
            f"the protocol {protocol}:// without an installed file system",
            expected="a protocol of fsspec",
            remedy=how_to_install("s3")
            if protocol == "s3"
            else "install the package that fsspec needs for it, such as gcsfs",
        ) from error
    given = {"self", *options, *conf.get(protocol, {})}
    named = signature(client.__init__).parameters.values()
    needed = [it.name for it in named if it.default is it.empty and it.kind not in _REST and it.name not in given]
    if needed:
        variables = " and ".join(f"FSSPEC_{protocol}_{name}".upper() for name in needed)
        raise InvalidSettings(
            f"the protocol {protocol}://, whose client needs {' and '.join(needed)} beside the URL",
            expected="a protocol whose URL is enough, such as s3://, gs:// or https://",
            remedy=f"copy the adapters to such a place, or set {variables}",
        )


def _path(filesystem: Any, url: str) -> str:
    return str(filesystem._strip_protocol(url))  # noqa: SLF001 - every file system has the call


class Answer(NamedTuple):
    """An HTTP answer to a request for a range; `version` is the object's ETag, or else the time of its last change."""

    status: int
    version: str | None
    content_range: str | None
    pieces: AsyncIterator[bytes]


async def write_range(file: SourceFile, start: int, end: int, write: Write, answer: Answer) -> None:
    """Hand an answer's body to `write`.

    Raises:
        BrokenAnswer: the body is not exactly this range. ObjectChanged: the body is of another version.
    """
    if not answer.version:  # the server may ignore If-Match too, and the object have changed
        raise BrokenAnswer("bytes of no known version")
    if answer.version.strip('"') != file.etag.strip('"'):
        raise ObjectChanged
    if answer.status == HTTPStatus.OK and (start, end) != (0, file.size_bytes):
        raise BrokenAnswer("the whole object in place of a range")
    place = f"bytes {start}-{end - 1}/{file.size_bytes}"
    if answer.status == HTTPStatus.PARTIAL_CONTENT and answer.content_range != place:
        raise BrokenAnswer("another range")
    async for piece in answer.pieces:
        if len(piece) > end - start:
            raise BrokenAnswer("a long body")
        write(piece)
        start += len(piece)
    if start != end:
        raise BrokenAnswer("a short body")


@cache  # one object: fsspec shares a file system between callers with equal options
def _staying() -> Any:
    import aiohttp

    config = aiohttp.TraceConfig()
    config.on_request_redirect.append(_check_redirect)
    return config


async def _check_redirect(_: Any, __: Any, redirect: Any) -> None:
    """Check a redirect before aiohttp follows the redirect; HTTPS on the same host is allowed too.

    Raises:
        HttpStatus: the redirect leads to another origin.
    """
    answer = redirect.response
    location = answer.headers.get("Location") or answer.headers.get("URI") or ""
    try:
        there = redirect.url.join(type(redirect.url)(location, encoded=True))
        is_upgrade = (redirect.url.scheme, there.scheme, there.host) == ("http", "https", redirect.url.host)
        stays = there.origin() == redirect.url.origin() or is_upgrade
    except ValueError:
        stays = False
    if not stays:
        answer.close()
        raise HttpStatus(answer.status, "that leads to another origin")
