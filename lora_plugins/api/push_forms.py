"""The forms of a push's body, each taken apart into files while the body arrives.

Content-Type selects the form:

- `application/octet-stream`: one safetensors file, whose `__metadata__` holds the text of adapter_config.json under
  that name;
- `multipart/form-data`: a part for each file of a PEFT directory, by file name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import INDEX_FILE, WEIGHTS_FILE, is_shard
from lora_plugins.errors import InvalidAdapter

OCTETS, PARTS = "application/octet-stream", "multipart/form-data"
_MAX_FILES = 1_000  # far more shards than any adapter has


class Form(Protocol):
    """One of the two forms: turns pieces of a body into pieces of files."""

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


def form_of(content_type: str, content_bytes: int | None) -> Form:
    """The form of a body with this Content-Type and Content-Length; raises InvalidAdapter for another type."""
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type or OCTETS)
    if kind == OCTETS.encode():
        return _OneFile(content_bytes)
    if kind == PARTS.encode() and options.get(b"boundary"):
        return _Parts(options[b"boundary"])
    raise broken(f"Content-Type: {content_type[:80]}", f"{OCTETS}, or {PARTS} with a boundary", "send the adapter so")


def is_of_adapter(name: str) -> bool:
    """Whether an adapter has a file of this name."""
    return name in {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, *CHAT_FILES} or is_shard(name)


def broken(found: str, expected: str, remedy: str = "push a whole PEFT adapter", *, file: str = "") -> InvalidAdapter:
    """The error of a body that breaks a rule."""
    return InvalidAdapter(found, expected=expected, remedy=remedy, file=file)


def check_number(files: int) -> None:
    """Raises InvalidAdapter for more files than a push may have."""
    if files > _MAX_FILES:
        raise broken(f"more than {_MAX_FILES} files", "fewer shards")


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
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser

        self._ready: list[tuple[str, bytes]] = []
        self._field = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._begun = 0
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
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise broken(
                f"a boundary of {len(boundary)} bytes ({error})", "a shorter one", "send the adapter so"
            ) from None

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        from python_multipart.exceptions import FormParserError

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
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = (options.get(b"filename") or options.get(b"name", b"")).decode(errors="replace")
        self._ready.append((self._name, b""))  # begins the file, even if no data follows

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            self._ready.append((self._name, data[start:end]))

    def _end(self) -> None:
        self._has_ended = True
