"""Bodies of pushes: three forms, in pieces of any size; refused at the first byte that shows that they are broken."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import aiofiles
import numpy as np
import pytest
from safetensors.numpy import load, save

from lora_plugins.adapter.chat import MAX_BYTES
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.api.push_body import receive
from lora_plugins.api.push_forms import form_of
from lora_plugins.errors import InvalidAdapter
from tests.make import CHAT, adapter_files, content

FILES = adapter_files()
ONE_FILE = save(load(FILES[WEIGHTS_FILE]), metadata={CONFIG_FILE: FILES[CONFIG_FILE].decode()})
SHARD = "adapter_model-00001-of-00001.safetensors"
LONG = "/".join(["dir" * 20] * 10)  # more than a tar header takes
BOUNDARY = "b0undary"


def parts(files: dict[str, bytes], *, end: str = "--") -> bytes:
    body = b"".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n"
        for name, data in files.items()
    )
    return body + f"--{BOUNDARY}{end}\r\n".encode()


def archive(
    files: dict[str, bytes], *, mtime: float = 0.5, kind: bytes = tarfile.REGTYPE, folder: str = "adapter", **form: int
) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **({"format": tarfile.PAX_FORMAT} | form)) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mtime, info.type = len(data) if kind == tarfile.REGTYPE else 0, mtime, kind
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def header(content: bytes, kind: bytes = tarfile.REGTYPE, size: int | None = None) -> bytes:
    """A file of an archive whose header may say another size."""
    info = tarfile.TarInfo("adapter")
    info.type, info.size = kind, len(content) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


FORMS: dict[str, tuple[str, bytes]] = {
    "one file": ("application/octet-stream", ONE_FILE),
    "no type": ("", ONE_FILE),
    "parts": (f"multipart/form-data; boundary={BOUNDARY}", parts(FILES)),
    "archive": ("application/x-tar", archive({"README.md": b"x" * 700, **FILES, "trainer_state.json": b"{}"})),
    "archive of long names": ("application/x-tar", archive({"README.md": b"", **FILES}, folder=LONG)),
    "GNU archive of long names": ("application/x-tar", archive(FILES, mtime=1, folder=LONG, format=tarfile.GNU_FORMAT)),
    "archive of whole seconds": ("application/x-tar", archive(FILES, mtime=1)),
}


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., str]:
    """Receive a body in pieces of so many bytes; returns its SHA-256."""

    def take(body: bytes, content_type: str, *, piece_bytes: int = 1000, announced: bool = True, **more: object) -> str:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), piece_bytes):
                take.received = start + piece_bytes  # type: ignore[attr-defined]
                yield body[start : start + piece_bytes]
            yield b""  # Starlette's end

        directory = tmp_path / "arrived"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        given = {"content_bytes": len(body) if announced else None, "max_bytes": 1 << 23, **more}
        received = receive(pieces(), directory, content_type=content_type, **given)  # type: ignore[arg-type]
        return asyncio.run(received)[0]

    return take


def arrived(tmp_path: Path) -> dict[str, bytes]:
    return content(tmp_path / "arrived")


def meaning(files: dict[str, bytes]) -> dict[str, object]:
    """An adapter's files, whatever the order of the keys of its JSON."""
    tensors = {name: it.tobytes() for name, it in load(files[WEIGHTS_FILE]).items()}
    return {**files, CONFIG_FILE: json.loads(files[CONFIG_FILE]), WEIGHTS_FILE: tensors}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("piece_bytes", [1, 7, 513, 1 << 20])
def test_each_form_arrives_whole_in_any_pieces(tmp_path: Path, take, form: str, piece_bytes: int) -> None:
    content_type, body = FORMS[form]
    assert take(body, content_type, piece_bytes=piece_bytes) == hashlib.sha256(body).hexdigest()
    assert meaning(arrived(tmp_path)) == meaning(FILES)


@pytest.mark.parametrize("form", ["parts", "archive"])
def test_files_for_chats_arrive_too(tmp_path: Path, take, form: str) -> None:
    make = parts if form == "parts" else archive
    take(make({**FILES, **CHAT}), FORMS[form][0])
    assert arrived(tmp_path) == {**FILES, **CHAT}
    for name, most_bytes in MAX_BYTES.items():
        if most_bytes >= 1 << 24:
            continue  # a body of 128 MiB for a bound that is the same lines
        with pytest.raises(InvalidAdapter, match=f"more than {most_bytes} bytes") as refused:
            take(make({**FILES, name: b" " * (most_bytes + 1)}), FORMS[form][0], max_bytes=1 << 24)
        assert refused.value.file == name


def test_a_body_without_announced_length_arrives_too(tmp_path: Path, take) -> None:
    take(ONE_FILE, "application/octet-stream", announced=False)
    assert arrived(tmp_path).keys() == FILES.keys()


PAX = b"15 comment=two\n"
SHARDS = {
    f"adapter_model-{number:05}-of-01000.safetensors": save({"a.lora_A.weight": np.zeros(1)})
    for number in range(1, 1001)
}

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "another type": ("application/zip", ONE_FILE, "Content-Type: application/zip"),
    "parts without a boundary": ("multipart/form-data", parts(FILES), "Content-Type: multipart/form-data"),
    "no safetensors": ("", b"\xff" * 5000, "a header of"),
    "an empty body": ("", b"", "no weights"),
    "half a length": ("", b"\x10\0\0", "3 bytes"),
    "bytes are missing": ("", ONE_FILE[:-1], "bytes in the file"),
    "no configuration": ("", FILES[WEIGHTS_FILE], f"no {CONFIG_FILE}"),
    "parts without configuration": (FORMS["parts"][0], parts({SHARD: ONE_FILE}), f"no {CONFIG_FILE}"),
    "an archive without configuration": ("application/x-tar", archive({SHARD: ONE_FILE}), f"no {CONFIG_FILE}"),
    "no weights": (FORMS["parts"][0], parts({CONFIG_FILE: b"{}"}), "no weights"),
    "a file of no adapter": (FORMS["parts"][0], parts({"../evil": b"x", **FILES}), "the file '../evil'"),
    "a file twice": (FORMS["parts"][0], parts(FILES, end="")[: -len(BOUNDARY) - 4] + parts(FILES), "twice"),
    "parts without their end": (FORMS["parts"][0], parts(FILES, end=""), "without its end"),
    "no parts": (FORMS["parts"][0], ONE_FILE, "no multipart body"),
    "no archive": ("application/x-tar", ONE_FILE, "no tar archive"),
    "a compressed archive": ("application/x-tar", gzip.compress(archive(FILES)), "without compression"),
    "half an archive": ("application/x-tar", archive(FILES)[:-9000], "without its end"),
    "a name too long": ("application/x-tar", archive(FILES, folder="x" * 70_000), "header of 70"),
    "a negative size": ("application/x-tar", header(b"", size=-600), "a file of -600 bytes"),
    "a pax header without fields": ("application/x-tar", header(b"no fields", b"x") + archive(FILES), "a pax header"),
    "many fields of a file": ("application/x-tar", header(b"5 a=\n" * 257, b"x") + archive(FILES), "than 256 fields"),
    "a size in words": ("application/x-tar", header(b"12 size=two\n", b"x") + archive(FILES), "a pax header whose"),
    "two pax headers of one file": ("application/x-tar", header(PAX, b"x") * 2 + archive(FILES), "two pax headers"),
    "two names of one file": ("application/x-tar", header(b"a/b", b"L") * 2 + archive(FILES), "two names"),
    "too many other files": ("application/x-tar", header(b"") * 10_001, "more than 10000 files"),
    "a boundary too long": (f"multipart/form-data; boundary={'b' * 300}", parts(FILES), "a boundary of 300 bytes"),
    "a file too many": (FORMS["parts"][0], parts({CONFIG_FILE: b"{}", **SHARDS}), "more than 1000 files"),
    "an archive of links": ("application/x-tar", archive(FILES, kind=tarfile.SYMTYPE), "which is no file"),
    "a pickle": ("application/x-tar", archive({CONFIG_FILE: b"{}", "adapter_model.bin": b"x"}), "no weights"),
}


def test_parts_are_counted_while_they_are_parsed() -> None:
    """A MiB of 75,000 empty parts once held the event loop 0.4 s."""
    form = form_of(FORMS["parts"][0], None)
    with pytest.raises(InvalidAdapter, match="more than 1000 files"):
        next(form.feed(b"--b0undary\r\nA:\r\n\r\n\r\n" * 1001))


def test_a_pax_header_may_have_other_fields_too(tmp_path: Path, take) -> None:
    comment = b"comment=" + b"c" * 60_000
    take(header(b"%d %s\n" % (len(comment) + 7, comment), b"x") + archive(FILES, mtime=1), "application/x-tar")
    assert arrived(tmp_path).keys() == FILES.keys()


def test_pax_headers_take_no_memory_however_many(take) -> None:
    """1.5 GB of them once took as much of the server's memory; here 20 MB, before a file and before each of many."""
    fields = [b"65000 k%06d=" % number for number in range(300)]
    records = [header(field.ljust(64_999, b"v") + b"\n", b"x") for field in fields]
    skipped = header(b"", b"5")  # a folder
    tracemalloc.start()
    try:
        with pytest.raises(InvalidAdapter, match="two pax headers"):
            take(b"".join(records), "application/x-tar", max_bytes=1 << 30)
        with pytest.raises(InvalidAdapter, match="without its end"):
            take(b"".join(record + skipped for record in records), "application/x-tar", max_bytes=1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000  # the body itself, twice, and little beside
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["parts", "archive"])
def test_one_file_is_open_at_a_time(tmp_path: Path, take, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, opens = [0], aiofiles.open

    def counted(*given: object) -> object:
        most[0] = max(most[0], sum(str(tmp_path) in it for it in open_files()))
        return opens(*given)  # type: ignore[call-overload]

    monkeypatch.setattr(aiofiles, "open", counted)
    make = parts if form == "parts" else archive
    take(make({**FILES, **dict(itertools.islice(SHARDS.items(), 50))}), FORMS[form][0])
    assert most[0] == 0, "the file before is closed"


def open_files() -> Iterator[str]:
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(entry.path)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_body_is_refused_for_what_it_is(take, case: str) -> None:
    content_type, body, found = BROKEN[case]
    with pytest.raises(InvalidAdapter, match=found):
        take(body, content_type)


HEADER_BYTES = 2_700_000  # of 18,040 tensors
AFTER = b"\0" * 4_000_000
NO_JSON = HEADER_BYTES.to_bytes(8, "little") + b"!" * HEADER_BYTES
SMALL = 8 + int.from_bytes(ONE_FILE[:8], "little")
FAULTS = {"length": (b"\xff" * 8, 8), "header": (NO_JSON, len(NO_JSON)), "size": (ONE_FILE, SMALL)}
SHOWN = [*itertools.product(("one file", "chunked", "parts", "archive"), ("length", "header"))]


@pytest.mark.parametrize(("form", "fault"), [*SHOWN, ("one file", "size"), ("archive", "size")])
def test_no_more_is_read_than_shows_the_fault(take, form: str, fault: str) -> None:
    weights, shown_at_bytes = FAULTS[fault]
    content_type, body = FORMS["one file" if form == "chunked" else form]
    if form in ("one file", "chunked"):
        body = weights + AFTER
    else:
        make = parts if form == "parts" else archive
        body = make({CONFIG_FILE: FILES[CONFIG_FILE], WEIGHTS_FILE: weights + AFTER})
    with pytest.raises(InvalidAdapter):
        take(body, content_type, announced=form != "chunked", max_bytes=len(body))
    # Pieces after the first MiB are joined to pieces of 1 MiB.
    assert take.received <= shown_at_bytes + (5000 if shown_at_bytes < 1 << 20 else 1 << 20)


def test_a_body_over_the_limit_is_not_read(take) -> None:
    with pytest.raises(InvalidAdapter, match="at most 100"):
        take(ONE_FILE, "", max_bytes=100)
    assert not hasattr(take, "received")
    with pytest.raises(InvalidAdapter, match="at most 100"):
        take(ONE_FILE, "", max_bytes=100, announced=False, piece_bytes=60)
    assert take.received == 120


def digest_header(body: bytes, *algorithms: str) -> str:
    hashes: Iterable[tuple[str, bytes]] = ((it, hashlib.new(it.replace("-", ""), body).digest()) for it in algorithms)
    return ", ".join(f"{name}=:{base64.b64encode(digest).decode()}:" for name, digest in hashes)


@pytest.mark.parametrize(
    "header", ["{}", "{};a=1", 'a="x, sha-512=:,\\"", {}', "crc32c=5, x.y=:AA==:, flag, {},", "{} ;a;b=(1 2), md5=::"]
)
def test_content_digest_is_compared(take, header: str) -> None:
    take(ONE_FILE, "", content_digest=header.format(digest_header(ONE_FILE, "sha-256")))
    with pytest.raises(InvalidAdapter, match="another sha-256"):
        take(ONE_FILE, "", content_digest=header.format(digest_header(b"", "sha-256")))


def test_another_content_digest_is_refused(take) -> None:
    for algorithms in (["sha-256"], ["sha-512"], ["sha-512", "sha-256"]):
        with pytest.raises(InvalidAdapter, match=r"another sha-.*the one of Content-Digest"):
            take(ONE_FILE, "", content_digest=digest_header(ONE_FILE + b"x", *algorithms))


def test_a_content_coding_is_refused_by_name(take) -> None:
    for coding, body in (("gzip", gzip.compress(ONE_FILE)), ("br", ONE_FILE), ("gzip, identity", ONE_FILE)):
        with pytest.raises(InvalidAdapter, match=f"Content-Encoding: {coding};.*uncompressed"):
            take(body, "", content_encoding=coding)
        assert not hasattr(take, "received"), "nothing is read"
    take(ONE_FILE, "", content_encoding="identity")


@pytest.mark.parametrize("header", ["sha-256", "sha-256=abc", "sha-256=:a:", "sha-256=:AA==:x"])
def test_a_malformed_content_digest_is_refused(take, header: str) -> None:
    with pytest.raises(InvalidAdapter, match="Content-Digest: sha-256"):
        take(ONE_FILE, "", content_digest=header)
