"""The body of a push, written to a directory while it arrives.

Content-Type selects the form:

- `application/octet-stream`: one safetensors file, whose `__metadata__` holds the text of adapter_config.json under
  that name;
- `multipart/form-data`: a part for each file of a PEFT directory, by file name;
- `application/x-tar`: a PEFT directory. Files that no adapter has (a README, the trainer's state) are skipped.

A body is refused at the first byte that breaks a rule: the length of a safetensors header, a broken header, a header
for another size than Content-Length or the tar archive says, a file too many, a byte over the limit. The processes that
verify adapters judge the weights later.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import aiofiles

from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES
from lora_plugins.adapter.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_header, read_metadata
from lora_plugins.adapter.weight_files import INDEX_FILE, MAX_INDEX_BYTES, WEIGHTS_FILE, is_shard
from lora_plugins.errors import InvalidAdapter, describing

OCTETS, PARTS, TAR = "application/octet-stream", "multipart/form-data", "application/x-tar"
_BLOCK_BYTES = 512  # of a tar archive
_AT_ONCE_BYTES = 1 << 20  # of the body
# Of a header checked here, 100,000 tensors; a longer header waits for the process that verifies.
_READ_AT_ONCE_BYTES = 1 << 24
# A member of a dictionary (RFC 8941), whose texts may have commas, and the value of a digest, perhaps with parameters.
_MEMBER = re.compile(r"""[ \t]*([a-z*][a-z0-9_.*-]*)((?:[^,"]|"(?:[^"\\]|\\.)*")*)(?:,|$)""")
_BYTES = re.compile(r"[ \t]*=[ \t]*:([A-Za-z0-9+/]+=*):[ \t]*(?:;.*)?")
_ALGORITHMS = {"sha-256": "sha256", "sha-512": "sha512"}


class _Form(Protocol):
    """One of the three forms: turns pieces of a body into pieces of files."""

    @property
    def file_bytes(self) -> int | None:
        """The size of the file whose piece `feed` has yielded; None where the form does not say."""
        ...

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """The file names and bytes in the next piece; raises InvalidAdapter where the form is broken."""
        ...

    def end(self) -> None:
        """Raises InvalidAdapter where the body ends too early."""
        ...


async def receive(
    body: AsyncIterator[bytes],
    directory: Path,
    *,
    content_type: str,
    content_bytes: int | None,
    max_bytes: int,
    content_digest: str = "",
) -> str:
    """Write the adapter in a body to `directory`; returns the body's SHA-256 in hexadecimal.

    Args:
        body: the body's pieces.
        directory: an empty directory of the store.
        content_type: selects the form; empty for the first.
        content_bytes: Content-Length; None for a chunked body.
        max_bytes: size limit of the body.
        content_digest: the Content-Digest header (RFC 9530), compared where it has SHA-256 or SHA-512.

    Raises:
        InvalidAdapter: the body is no adapter, too large, or does not match Content-Digest.
        OSError: a file cannot be written.
    """
    # Always compute SHA-256: the digest of the body is the version of the push.
    promised = _promised(content_digest)
    hashes = {name: hashlib.new(_ALGORITHMS[name]) for name in ("sha-256", *promised)}
    form = _form_of(content_type, content_bytes)
    # At most `max_bytes` may reach the disk: check the announced size first, then every piece.
    _check_size(content_bytes or 0, max_bytes)
    async with AsyncExitStack() as stack:
        files = _Files(directory, stack)
        async for piece in _larger(body, max_bytes):
            for digest in hashes.values():
                digest.update(piece)
            for name, part in form.feed(piece):
                await files.write(name, part, form.file_bytes)
        # A body may end cleanly for HTTP and still lack its form's end mark.
        form.end()
        await files.complete()
    for name, wanted in promised.items():
        if hashes[name].digest() != wanted:
            raise _broken(f"a body with another {name}", "the one of Content-Digest", "send the body again")
    # The one-file form carries the configuration in the weights' metadata.
    if not (directory / CONFIG_FILE).exists():
        await asyncio.to_thread(_take_config, directory)
    return hashes["sha-256"].hexdigest()


async def _larger(body: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of a body, joined to 1 MiB after the first MiB, because each write takes a thread.

    Most faults show in the first MiB, so its pieces are passed on at once.

    Raises:
        InvalidAdapter: the body is larger than `max_bytes`.
    """
    received_bytes, together = 0, bytearray()
    async for piece in body:
        received_bytes += len(piece)
        _check_size(received_bytes, max_bytes)
        together += piece
        if together and (received_bytes <= _AT_ONCE_BYTES or len(together) >= _AT_ONCE_BYTES):
            yield bytes(together)
            together.clear()
    if together:
        yield bytes(together)


class _Files:
    """The files of one directory, each checked while it grows."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._open: dict[str, Any] = {}
        self._sizes_bytes: dict[str, int] = {}
        self._headers: dict[str, bytearray] = {}

    async def write(self, name: str, piece: bytes, file_bytes: int | None) -> None:
        """Append to a file of `file_bytes` bytes, if known; an empty piece begins the file.

        Raises:
            InvalidAdapter: the file is none of an adapter's, or its beginning is no safetensors header.
        """
        # An empty piece begins a file, so a second empty piece is a second file of the same name.
        if not piece and name in self._open:
            raise _broken(f"the file '{name}' twice", _EXPECTED_FILES)
        if name not in self._open:
            if not _is_of_adapter(name):
                raise _broken(f"the file '{name[:80]}'", _EXPECTED_FILES)
            # "x": never overwrite a file that is there already.
            opened = aiofiles.open(self._directory / name, "xb")
            self._open[name] = await self._stack.enter_async_context(opened)
            self._sizes_bytes[name] = 0
        self._sizes_bytes[name] += len(piece)
        limit_bytes = {CONFIG_FILE: MAX_CONFIG_BYTES, INDEX_FILE: MAX_INDEX_BYTES}.get(name)
        if limit_bytes is not None and self._sizes_bytes[name] > limit_bytes:
            raise _broken(f"more than {limit_bytes} bytes", "a file of that size at most", file=name)
        await self._open[name].write(piece)
        if name.endswith(".safetensors"):
            await self._check_header(name, piece, file_bytes)

    async def complete(self) -> None:
        """Close all files.

        Raises:
            InvalidAdapter: there are no weights.
        """
        for opened in self._open.values():
            await opened.flush()
        if not any(name.endswith(".safetensors") for name in self._sizes_bytes):
            raise _broken("no weights", WEIGHTS_FILE)
        for name, seen in self._headers.items():
            if len(seen) < LENGTH_BYTES:
                raise _broken(f"{len(seen)} bytes", "a safetensors file", file=name)

    async def _check_header(self, name: str, piece: bytes, file_bytes: int | None) -> None:
        """Judge a weights file by its first bytes, and by its header once the header has arrived."""
        seen = self._headers.setdefault(name, bytearray())
        if len(seen) < LENGTH_BYTES:
            seen += piece[: LENGTH_BYTES - len(seen)]
            most_bytes = MAX_HEADER_BYTES if file_bytes is None else min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
            if len(seen) == LENGTH_BYTES and not 2 <= _header_bytes(seen) <= most_bytes:
                raise _broken(f"a header of {_header_bytes(seen)} bytes", "a safetensors file", file=name)
        # The header's end may lie in any piece: check once, at the piece that brings the last byte of the header.
        end = LENGTH_BYTES + _header_bytes(seen)
        has_all = len(seen) == LENGTH_BYTES and self._sizes_bytes[name] - len(piece) < end <= self._sizes_bytes[name]
        if has_all and end <= _READ_AT_ONCE_BYTES:
            await self._open[name].flush()
            await asyncio.to_thread(_read_header, self._directory / name, file_bytes)


class _OneFile:
    """A body that is one safetensors file."""

    def __init__(self, file_bytes: int | None) -> None:
        self.file_bytes = file_bytes

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        yield WEIGHTS_FILE, piece

    def end(self) -> None:
        pass


class _Parts:
    """The parts of a multipart body, by their file names."""

    file_bytes = None

    def __init__(self, boundary: bytes) -> None:
        from python_multipart.multipart import MultipartParser

        self._ready: list[tuple[str, bytes]] = []
        self._field = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._has_ended = False
        callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._take_field,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _broken(f"no multipart body ({error})", "parts by the boundary of Content-Type") from None
        ready, self._ready = self._ready, []
        yield from ready

    def end(self) -> None:
        if not self._has_ended:
            raise _broken("a multipart body without its end", "the whole body", "send the body again")

    def _begin(self) -> None:
        self._headers = {}

    def _take_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = (options.get(b"filename") or options.get(b"name", b"")).decode(errors="replace")
        self._ready.append((self._name, b""))  # begins the file, even if no data follows

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            self._ready.append((self._name, data[start:end]))

    def _end(self) -> None:
        self._has_ended = True


class _Archive:
    """The files of a tar archive, in any folder; files that no adapter has are skipped."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._name, self.file_bytes = "", 0
        # Of the present file: content bytes left, then zeros up to the next block.
        self._left_bytes = self._padding_bytes = 0
        self._has_end = False
        # While the present file is a record, a long name or a pax header, of the next file; and what records have said.
        self._record: bytearray | None = None
        self._reads_record = _pax_fields
        self._fields: dict[bytes, bytes] = {}

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        view = memoryview(piece)
        while view:
            if self._left_bytes:
                part, view = view[: self._left_bytes], view[self._left_bytes :]
                self._left_bytes -= len(part)
                if self._record is not None:
                    self._record += part
                elif self._name:
                    yield self._name, bytes(part)
            elif self._padding_bytes:
                skipped = min(self._padding_bytes, len(view))
                self._padding_bytes -= skipped
                view = view[skipped:]
            else:
                missing = _BLOCK_BYTES - len(self._block)
                self._block += view[:missing]
                view = view[missing:]
                if len(self._block) == _BLOCK_BYTES:
                    yield from self._begin_file(bytes(self._block))
                    self._block.clear()

    def end(self) -> None:
        if self._left_bytes or self._block or not self._has_end:
            raise _broken("an archive without its end", "the whole tar archive", "send the body again")

    def _begin_file(self, block: bytes) -> Iterator[tuple[str, bytes]]:
        # A block of zeros ends an archive.
        self._has_end = not any(block)
        if self._has_end:
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _broken(f"no tar archive ({error})", "an uncompressed tar archive") from None
        if self._record is not None:
            self._fields |= self._reads_record(bytes(self._record))
            self._record = None
        if header.type in _RECORDS:
            self._begin_record(header)
            return
        fields, self._fields = self._fields, {}
        path = fields.get(b"path", header.name.encode("utf-8", "surrogateescape")).decode(errors="replace")
        # Only the last part of the name: a path in an archive must never leave the directory.
        name = path.rpartition("/")[2]
        is_taken = header.isreg() and _is_of_adapter(name)
        if not (is_taken or header.isreg() or header.isdir() or header.type in _SKIPPED):
            raise _broken(f"'{path[:80]}', which is no file", "files and folders only")
        self._name = name if is_taken else ""
        # POSIX lets a directory have a size, which is a hint and not followed by content.
        self._expect(0 if header.isdir() else int(fields.get(b"size", header.size)))
        if is_taken:
            yield name, b""

    def _begin_record(self, header: tarfile.TarInfo) -> None:
        if header.size > _MAX_RECORD_BYTES:
            raise _broken(f"a name or a pax header of {header.size} bytes", f"at most {_MAX_RECORD_BYTES} bytes")
        self._record, self._reads_record = bytearray(), _RECORDS[header.type]
        self._expect(header.size)

    def _expect(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise _broken(f"a file of {size_bytes} bytes", "a tar archive")
        self.file_bytes = self._left_bytes = size_bytes
        self._padding_bytes = -size_bytes % _BLOCK_BYTES


def _long_name(record: bytes) -> dict[bytes, bytes]:
    return {b"path": record.rstrip(b"\0")}


def _pax_fields(record: bytes) -> dict[bytes, bytes]:
    """The fields of a pax header: lines `LENGTH KEY=VALUE`, with the length of the whole line."""
    fields, at = {}, 0
    while at < len(record):
        match = _PAX_FIELD.match(record, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(record):
            raise _broken("a pax header without length, key and value", "a tar archive")
        fields[match[2]] = record[match.end() : end - 1]
        at = end
    if not re.fullmatch(rb"\d{1,18}", fields.get(b"size", b"0")):
        raise _broken("a pax header whose size is no number", "a tar archive")
    return fields


_PAX_FIELD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_MAX_RECORD_BYTES = 1 << 16
_RECORDS = {tarfile.GNUTYPE_LONGNAME: _long_name, tarfile.XHDTYPE: _pax_fields}
_SKIPPED = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)  # fields of all files; the target of a link, which is refused
_EXPECTED_FILES = f"{CONFIG_FILE} and {WEIGHTS_FILE}, or its shards with {INDEX_FILE}, each once"


def _is_of_adapter(name: str) -> bool:
    return name in {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE} or is_shard(name)


def _form_of(content_type: str, content_bytes: int | None) -> _Form:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type or OCTETS)
    if kind == OCTETS.encode():
        return _OneFile(content_bytes)
    if kind == PARTS.encode() and options.get(b"boundary"):
        return _Parts(options[b"boundary"])
    if kind == TAR.encode():
        return _Archive()
    raise _broken(
        f"Content-Type: {content_type[:80]}", f"{OCTETS}, {PARTS} with a boundary, or {TAR}", "send the adapter so"
    )


def _promised(content_digest: str) -> dict[str, bytes]:
    """The digests of a Content-Digest header with a known algorithm; other members may have any value."""
    found, at, text = {}, 0, content_digest.strip(" \t,")
    while at < len(text):
        member = _MEMBER.match(text, at)
        if member is None:
            raise _broken(f"Content-Digest: {content_digest[:80]}", "sha-256=:BASE64: (RFC 9530)", "correct the header")
        at = member.end()
        if member[1] in _ALGORITHMS:
            value = _BYTES.fullmatch(member[2])
            try:
                found[member[1]] = base64.b64decode(value[1] if value else "?", validate=True)
            except ValueError:
                raise _broken(
                    f"Content-Digest: {content_digest[:80]}", f"{member[1]}=:BASE64: (RFC 9530)", "correct the header"
                ) from None
    return found


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise _broken(
            f"{size_bytes} bytes or more",
            f"at most {max_bytes}",
            "push a smaller adapter, or raise LORA_PLUGINS_MAX_ADAPTER_BYTES",
        )


def _header_bytes(seen: bytearray) -> int:
    return int.from_bytes(seen, "little")


def _read_header(path: Path, size_bytes: int | None) -> None:
    with path.open("rb") as file, describing(file=path.name):
        read_header(file, size_bytes)


def _take_config(directory: Path) -> None:
    """Write adapter_config.json from the metadata of the weights."""
    text = None
    if (directory / WEIGHTS_FILE).exists():  # shards have no such metadata
        with (directory / WEIGHTS_FILE).open("rb") as file, describing(file=WEIGHTS_FILE):
            text = read_metadata(file).get(CONFIG_FILE)
    if text is None:
        raise _broken(
            f"no {CONFIG_FILE}",
            "the file, or its text under this name in the metadata of the weights",
            "push both, as lora_plugins.client does",
        )
    (directory / CONFIG_FILE).write_text(text)


def _broken(found: str, expected: str, remedy: str = "push a whole PEFT adapter", *, file: str = "") -> InvalidAdapter:
    return InvalidAdapter(found, expected=expected, remedy=remedy, file=file)
