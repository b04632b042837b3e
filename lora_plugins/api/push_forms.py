"""The three forms of a push's body, each taken apart into files while the body arrives.

Runs in the event loop of the API server, for each piece of a body that `push_body.py` receives. Each class takes one
form apart. `feed` takes a piece of the body, and yields pairs of a file's name and bytes of the file, in the file's
order; a pair with empty bytes begins a file. `end` is called after the last piece. `file_bytes` is the size of the
present file, None where the form does not say. `feed` and `end` raise InvalidAdapter where the form is broken, or the
body ends too early.

Content-Type selects the form:

- `application/octet-stream`: one safetensors file, whose `__metadata__` holds the text of adapter_config.json under
  that name;
- `multipart/form-data`: a part for each file of a PEFT directory, by file name;
- `application/x-tar`: a PEFT directory. Files that no adapter has (a README, the trainer's state) are skipped.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from lora_plugins.adapter.chat import CHAT_FILES, TOOLS_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import INDEX_FILE, WEIGHTS_FILE, is_shard
from lora_plugins.errors import InvalidAdapter

OCTETS, PARTS, TAR = "application/octet-stream", "multipart/form-data", "application/x-tar"
_MAX_FILES = 1_000  # far more shards than any adapter has
_BLOCK_BYTES = 512  # of a tar archive


def form_of(content_type: str, content_bytes: int | None) -> OneFile | Parts | Archive:
    """The form of a body with this Content-Type and Content-Length (None for a chunked body).

    Raises:
        InvalidAdapter: the Content-Type is none of the three.
    """
    # Without Content-Type, the body is one safetensors file.
    kind, options = parse_options_header(content_type or OCTETS)
    if kind == OCTETS.encode():
        return OneFile(content_bytes)
    if kind == PARTS.encode() and options.get(b"boundary"):
        return Parts(options[b"boundary"])
    if kind == TAR.encode():
        return Archive()
    raise broken(
        f"Content-Type: {content_type[:80]}", f"{OCTETS}, {PARTS} with a boundary, or {TAR}", "send the adapter so"
    )


def is_of_adapter(name: str) -> bool:
    """Whether an adapter has a file of this name."""
    return name in {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, *CHAT_FILES} or is_shard(name)


def broken(found: str, expected: str, remedy: str = "push a whole PEFT adapter", *, file: str = "") -> InvalidAdapter:
    """The error of a body that breaks a rule; `file` is the name of a file in the body, if one file is at fault."""
    return InvalidAdapter(found, expected=expected, remedy=remedy, file=file)


def check_number(files: int) -> None:
    """Raise InvalidAdapter where `files`, a number of files, is more than a push may have."""
    if files > _MAX_FILES:
        raise broken(f"more than {_MAX_FILES} files", "fewer shards")


class OneFile:
    """A body that is one safetensors file; nothing marks the end, so `end` has nothing to check."""

    def __init__(self, file_bytes: int | None) -> None:
        self.file_bytes = file_bytes

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        yield WEIGHTS_FILE, piece

    def end(self) -> None:
        pass


class Parts:
    """The parts of a multipart body, by their file names."""

    file_bytes = None

    def __init__(self, boundary: bytes) -> None:
        self._ready: list[tuple[str, bytes]] = []  # for `feed`, which yields what the parser's callbacks have added
        self._field = self._value = b""  # of the header being read, which may come in several pieces
        self._headers: dict[bytes, bytes] = {}  # of the present part
        self._name = ""  # of the present part's file
        self._begun = 0  # number of parts
        self._has_ended = False  # the body's last boundary has come
        callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._take_field,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise broken(
                f"a boundary of {len(boundary)} bytes ({error})", "a shorter one", "send the adapter so"
            ) from None

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise broken(f"no multipart body ({error})", "parts by the boundary of Content-Type") from None
        ready, self._ready = self._ready, []
        yield from ready

    def end(self) -> None:
        if not self._has_ended:
            raise broken("a multipart body without its end", "the whole body", "send the body again")

    def _begin(self) -> None:
        self._begun += 1
        check_number(self._begun)
        self._headers = {}

    def _take_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = (options.get(b"filename") or options.get(b"name", b"")).decode(errors="replace")
        self._ready.append((self._name, b""))  # begins the file, even if no data follows

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            self._ready.append((self._name, data[start:end]))

    def _end(self) -> None:
        self._has_ended = True


class Archive:
    """The files of a tar archive, in any folder; files that no adapter has are skipped.

    An archive is a row of blocks: a header block for each file, then the file's content, with zeros up to the next
    block. A *record* looks like a file, and its content is a long name or a pax header, for the file that follows.
    `tarfile` is not used to read the stream: it reads records of any size into memory, and takes a broken header for
    the archive's end.
    """

    def __init__(self) -> None:
        self._block = bytearray()  # the part of the next header block that has arrived
        self._name, self.file_bytes = "", 0  # of the present file; the name is empty while a file is skipped
        # Of the present file: content bytes left, then zeros up to the next block.
        self._left_bytes = self._padding_bytes = 0
        self._has_end = False
        self._record: bytearray | None = None  # content of the present record; None while the present file is none
        self._reads_record = _RECORDS[tarfile.XHDTYPE]  # for the present record's type; set as a record begins
        self._record_types: set[bytes] = set()  # of the records before the next file
        self._fields: dict[bytes, bytes] = {}  # `path` and `size` that records have given the next file
        self._headers = 0  # number of header blocks

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
            raise broken("an archive without its end", "the whole tar archive", "send the body again")

    def _begin_file(self, block: bytes) -> Iterator[tuple[str, bytes]]:
        # A block of zeros ends an archive, and only zeros may follow: other readers of tar would not see anything else.
        if self._has_end or not any(block):
            if any(block) or self._record is not None:
                raise broken("an archive that ends in its midst", "one whole tar archive")
            self._has_end = True
            return
        self._headers += 1
        if self._headers > _MAX_HEADERS:
            raise broken(f"an archive of more than {_MAX_HEADERS} files", "the adapter's folder alone")
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise broken(f"no tar archive ({error})", "a tar archive", "pack the adapter without compression") from None
        if self._record is not None:  # this header follows a record, which is complete now
            said = self._reads_record(bytes(self._record))
            if said.keys() & self._fields.keys():
                raise broken("two names of one file", "one name for a file")
            self._fields |= said
            self._record = None
        if header.type in _RECORDS:
            self._begin_record(header)
            return
        fields, self._fields = self._fields, {}
        self._record_types.clear()
        # A record's path and size go before the header's own, which have no room for long paths and large sizes.
        path = fields.get(b"path", header.name.encode("utf-8", "surrogateescape")).decode(errors="replace")
        # Take only the last part of the path, so that no path in an archive leaves the directory. `TOOLS_FILE` is the
        # only file of an adapter with a folder in its name.
        name = TOOLS_FILE if path.endswith(TOOLS_FILE) else path.rpartition("/")[2]
        is_file = header.isreg() and header.type != tarfile.GNUTYPE_SPARSE
        is_taken = is_file and is_of_adapter(name)
        if not (is_file or header.isdir()):
            raise broken(f"'{path[:80]}', which is no file", "whole files and folders only")
        self._name = name if is_taken else ""
        # POSIX lets a directory have a size, which is a hint and not followed by content.
        self._expect(0 if header.isdir() else int(fields.get(b"size", header.size)))
        if is_taken:
            yield name, b""

    def _begin_record(self, header: tarfile.TarInfo) -> None:
        if header.size > _MAX_RECORD_BYTES:
            raise broken(f"a name or a pax header of {header.size} bytes", f"at most {_MAX_RECORD_BYTES} bytes")
        if header.type in self._record_types:
            raise broken("two names or two pax headers of one file", "one of each before a file")
        self._record_types.add(header.type)
        self._record, self._reads_record = bytearray(), _RECORDS[header.type]
        self._expect(header.size)

    def _expect(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise broken(f"a file of {size_bytes} bytes", "a tar archive")
        self.file_bytes = self._left_bytes = size_bytes
        self._padding_bytes = -size_bytes % _BLOCK_BYTES


def _fields_of_all(record: bytes) -> dict[bytes, bytes]:
    """No fields, from a global pax header, whose fields are for all files that follow; a path or size is refused."""
    if _pax_fields(record):
        raise broken("a path or a size of all files", "a path and a size for each file")
    return {}


def _pax_fields(record: bytes) -> dict[bytes, bytes]:
    """The path and the size in a pax header: lines `LENGTH KEY=VALUE`, with the length of the whole line."""
    fields, at, count = {}, 0, 0
    while at < len(record):
        count += 1
        if count > _MAX_FIELDS:
            raise broken(f"a pax header of more than {_MAX_FIELDS} fields", "fewer extended attributes of a file")
        # LENGTH counts from its own first digit to the newline at the line's end.
        match = _PAX_FIELD.match(record, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(record):
            raise broken("a pax header without length, key and value", "a tar archive")
        if match[2].startswith(b"GNU.sparse."):
            raise broken("a sparse file", "whole files, as tar writes them without --sparse")
        if match[2] in (b"path", b"size"):
            fields[match[2]] = record[match.end() : end - 1].rstrip(b"/")
        at = end
    if not re.fullmatch(rb"\d{1,18}", fields.get(b"size", b"0")):
        raise broken("a pax header whose size is no number", "a tar archive")
    return fields


_PAX_FIELD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_MAX_HEADERS = 10_000  # each takes 15 µs of the event loop
_MAX_RECORD_BYTES = 1 << 16
_MAX_FIELDS = 256  # of a record; 13,000 take 6 ms of the event loop, and a MiB has 16 records
# How a record of each type is read: the content comes in, the next file's `path` and `size` come out where given.
_RECORDS: dict[bytes, Callable[[bytes], dict[bytes, bytes]]] = {
    tarfile.GNUTYPE_LONGNAME: lambda record: {b"path": record.partition(b"\0")[0]},
    tarfile.GNUTYPE_LONGLINK: lambda _: {},  # the target of a link, which is refused
    tarfile.XHDTYPE: _pax_fields,
    tarfile.XGLTYPE: _fields_of_all,
}
