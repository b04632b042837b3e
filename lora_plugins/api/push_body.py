"""The body of a push, written to a directory while the body arrives.

Runs in the event loop of the API server, for each push. In: the body's pieces and the headers that describe the body.
Out: an adapter's files in the directory, and the body's SHA-256. `push_forms.py` takes the body apart.

A body is refused at the first byte that breaks a rule: the length of a safetensors header, a broken header, a header
for another size than Content-Length or the tar archive says, a file too many, a byte over the limit. The processes that
verify adapters judge the weights later.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from lora_plugins.adapter.chat import MAX_BYTES
from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES
from lora_plugins.adapter.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_header, read_metadata
from lora_plugins.adapter.weight_files import INDEX_FILE, MAX_INDEX_BYTES, WEIGHTS_FILE
from lora_plugins.api.push_forms import broken, check_number, form_of, is_of_adapter
from lora_plugins.errors import describing

_AT_ONCE_BYTES = 1 << 20  # of the body, written at a time
# Enough for a header of 100,000 tensors; a longer header is checked later, by the process that verifies adapters.
_READ_AT_ONCE_BYTES = 1 << 24
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')  # a string in a dictionary (RFC 8941), whose commas separate no members
# The algorithms of Content-Digest that are compared, with their names in hashlib.
_ALGORITHMS = {"sha-256": "sha256", "sha-512": "sha512"}
_EXPECTED_FILES = f"{CONFIG_FILE} and {WEIGHTS_FILE}, or its shards with {INDEX_FILE}, each once"


async def receive(
    body: AsyncIterator[bytes],
    directory: Path,
    *,
    content_type: str,
    content_bytes: int | None,
    max_bytes: int,
    content_digest: str = "",
    content_encoding: str = "",
    leaves_out: Collection[str] = (),
) -> tuple[str, frozenset[str]]:
    """Write the adapter in a body to `directory`; return the body's SHA-256 in hexadecimal, and what was left out.

    Args:
        body: the body's pieces.
        directory: an empty directory of the store.
        content_type: the Content-Type header, which selects the form; without it, the body is one safetensors file.
        content_bytes: Content-Length; None for a chunked body.
        max_bytes: size limit of the body.
        content_digest: the Content-Digest header (RFC 9530), compared where it has SHA-256 or SHA-512; empty without.
        content_encoding: the Content-Encoding header; every coding is refused.
        leaves_out: names of files that are not written, although the body may have them.

    Raises:
        InvalidAdapter: the body is no adapter, too large, or does not match Content-Digest.
        OSError: a file cannot be written.
    """
    if content_encoding not in ("", "identity"):
        raise broken(f"Content-Encoding: {content_encoding[:80]}", "no coding", "send the body uncompressed")
    # Always compute SHA-256: the digest of the body is the version of the push.
    promised = _promised(content_digest)
    hashes = {name: hashlib.new(_ALGORITHMS[name]) for name in ("sha-256", *promised)}
    form = form_of(content_type, content_bytes)
    # At most `max_bytes` may reach the disk: check the announced size first, if any, then every piece.
    _check_size(content_bytes or 0, max_bytes)
    left_out = set()
    async with aclosing(_Files(directory)) as files:
        async for piece in _larger(body, max_bytes):
            for digest in hashes.values():
                digest.update(piece)
            for name, part in form.feed(piece):
                if name in leaves_out:
                    left_out.add(name)
                else:
                    await files.write(name, part, form.file_bytes)
        # A body may end cleanly for HTTP and still lack its form's end mark.
        form.end()
        files.complete()
    for name, wanted in promised.items():
        if hashes[name].digest() != wanted:
            raise broken(f"a body with another {name}", "the one of Content-Digest", "send the body again")
    # The one-file form carries the configuration in the weights' metadata.
    if not (directory / CONFIG_FILE).exists():
        await asyncio.to_thread(_take_config, directory)
    return hashes["sha-256"].hexdigest(), frozenset(left_out)


async def _larger(body: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of a body: as they come within the first MiB, and joined to at least 1 MiB afterwards.

    Most faults show in the first MiB, so its pieces are checked at once. Afterwards larger pieces cost less, because
    each write takes a thread.

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
    """The files of one directory, one after the other, each checked while it grows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: Any = None  # the last file begun
        self._sizes_bytes: dict[str, int] = {}  # of the files begun, by name: what was written so far
        self._headers: dict[str, bytearray] = {}  # the first `LENGTH_BYTES` bytes of each weights file

    async def aclose(self) -> None:
        if self._open is not None:
            await self._open.close()

    async def write(self, name: str, piece: bytes, file_bytes: int | None) -> None:
        """Append to a file of `file_bytes` bytes, if known; an empty piece begins the file.

        Raises:
            InvalidAdapter: the file is none of an adapter's, or its beginning is no safetensors header.
        """
        # An empty piece begins a file, so a second empty piece is a second file of the same name.
        if not piece and name in self._sizes_bytes:
            raise broken(f"the file '{name}' twice", _EXPECTED_FILES)
        if name not in self._sizes_bytes:
            if not is_of_adapter(name):
                raise broken(f"the file '{name[:80]}'", _EXPECTED_FILES)
            check_number(len(self._sizes_bytes) + 1)
            if self._open is not None:
                await self._open.close()
            if "/" in name:  # of an adapter's files, only one of its chat files lies in a folder
                await aiofiles.os.makedirs((self._directory / name).parent, exist_ok=True)
            # "x": never overwrite a file that is there already.
            self._open = await aiofiles.open(self._directory / name, "xb")
            self._sizes_bytes[name] = 0
        self._sizes_bytes[name] += len(piece)
        limit_bytes = {CONFIG_FILE: MAX_CONFIG_BYTES, INDEX_FILE: MAX_INDEX_BYTES, **MAX_BYTES}.get(name)
        if limit_bytes is not None and self._sizes_bytes[name] > limit_bytes:
            raise broken(f"more than {limit_bytes} bytes", "a file of that size at most", file=name)
        await self._open.write(piece)
        if name.endswith(".safetensors"):
            await self._check_header(name, piece, file_bytes)

    def complete(self) -> None:
        """Check that weights have arrived.

        Raises:
            InvalidAdapter: there are no weights, or a file is shorter than any weights.
        """
        if not any(name.endswith(".safetensors") for name in self._sizes_bytes):
            raise broken("no weights", WEIGHTS_FILE)
        # A file as short as this has never reached the check of its header.
        for name, seen in self._headers.items():
            if len(seen) < LENGTH_BYTES:
                raise broken(f"{len(seen)} bytes", "a safetensors file", file=name)

    async def _check_header(self, name: str, piece: bytes, file_bytes: int | None) -> None:
        """Check a weights file's first bytes, the header's length, and the header itself once all of it has arrived.

        `piece` was written last; `file_bytes` is the size that the file will have, None where unknown.
        """
        seen = self._headers.setdefault(name, bytearray())
        if len(seen) < LENGTH_BYTES:
            seen += piece[: LENGTH_BYTES - len(seen)]
            # No header is shorter than `{}`, nor longer than the file's rest.
            most_bytes = MAX_HEADER_BYTES if file_bytes is None else min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
            if len(seen) == LENGTH_BYTES and not 2 <= _header_bytes(seen) <= most_bytes:
                raise broken(f"a header of {_header_bytes(seen)} bytes", "a safetensors file", file=name)
        # The header's end may lie in any piece: check once, at the piece that brings the last byte of the header.
        end = LENGTH_BYTES + _header_bytes(seen)
        has_all = len(seen) == LENGTH_BYTES and self._sizes_bytes[name] - len(piece) < end <= self._sizes_bytes[name]
        if has_all and end <= _READ_AT_ONCE_BYTES:
            await self._open.flush()
            await asyncio.to_thread(_read_header, self._directory / name, file_bytes)


def _promised(content_digest: str) -> dict[str, bytes]:
    """The digests in a Content-Digest header, by algorithm; members with unknown algorithms are ignored.

    Raises:
        InvalidAdapter: the value of a known algorithm is no byte sequence of RFC 8941.
    """
    found = {}
    for member in _TEXT.sub("", content_digest).split(","):
        key, _, value = member.partition(";")[0].partition("=")
        if (name := key.strip().lower()) in _ALGORITHMS:
            encoded = re.fullmatch(r"\s*:(.+):\s*", value)
            try:
                # "?" is no base64, so a value without colons raises too.
                found[name] = base64.b64decode(encoded[1] if encoded else "?", validate=True)
            except ValueError:
                raise broken(
                    f"Content-Digest: {content_digest[:80]}", f"{name}=:BASE64: (RFC 9530)", "correct the header"
                ) from None
    return found


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise broken(
            f"{size_bytes} bytes or more",
            f"at most {max_bytes}",
            "push a smaller adapter, or raise LORA_PLUGINS_MAX_ADAPTER_BYTES",
        )


def _header_bytes(seen: bytearray) -> int:
    """The header's length, which the first 8 bytes of a safetensors file say."""
    return int.from_bytes(seen, "little")


def _read_header(path: Path, size_bytes: int | None) -> None:
    with path.open("rb") as file, describing(file=path.name):
        read_header(file, size_bytes)


def _take_config(directory: Path) -> None:
    """Write adapter_config.json from the metadata of the weights.

    Raises:
        InvalidAdapter: the metadata has no configuration, or there is no single file of weights.
    """
    text = None
    if (directory / WEIGHTS_FILE).exists():  # shards have no such metadata
        with (directory / WEIGHTS_FILE).open("rb") as file, describing(file=WEIGHTS_FILE):
            text = read_metadata(file, _READ_AT_ONCE_BYTES).get(CONFIG_FILE)
    if text is None:
        raise broken(
            f"no {CONFIG_FILE}",
            "the file, or its text under this name in the metadata of the weights",
            "push both, as lora_plugins.client does",
        )
    (directory / CONFIG_FILE).write_bytes(text.encode())
