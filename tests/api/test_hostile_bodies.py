"""Hostile bodies: refused as bodies of pushes are, or exactly the files that tarfile, safetensors or HTTP read."""

from __future__ import annotations

import io
import os
import random
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.api.push_forms import is_of_adapter
from lora_plugins.errors import InvalidAdapter
from tests.api.test_push_body import BOUNDARY, FILES, FORMS, LONG, ONE_FILE, archive, arrived, header, parts, take
from tests.repetitions import times

__all__ = ["take"]  # the fixture

TAR, PARTS = "application/x-tar", FORMS["parts"][0]
CONFIG_ONLY, WEIGHTS_ONLY = ({name: FILES[name]} for name in (CONFIG_FILE, WEIGHTS_FILE))
ZEROS = bytes(512)
PAX_FIELDS = b"path=a/adapter_config.json path=b/adapter_model.safetensors/ path= size=0 size=1000 size=".split()
PAX_FIELDS += b"GNU.sparse.map=0,10 GNU.sparse.size=5000 GNU.sparse.name=adapter_config.json hdrcharset=BINARY".split()
PAX_FIELDS += [b"comment=x", b"path=x\0y"]
LONG_NAMES = [b"adapter_config.json\0", b"adapter_config.json\0evil", b"a/adapter_model.safetensors", b"x/\0", b""]
FILE_NAMES = [b"../adapter_config.json", b"/adapter_config.json/", b"Adapter_config.json", b"adapter_config.json\0evil"]
FILE_NAMES += ["adapter＿config.json".encode(), b"a/adapter_model.safetensors"]
SIZES = [b"%011o\0" % 1000, b"\x80" + bytes(9) + b"\x07\xff", b"\xff" * 12, b"-0000000001\0", b" 17 \0", b"1_0\0"]
LINES = [b"\r", b"\n", b"\r\n", b"--", b"--b0undary", b"\r\n--b0undary--", b"\r\n--b0undary\r\n", b"\0", b"\xff", b": "]
LINES += [b"\r\n\r\n", b'filename="adapter_config.json"', b"A: " + b"x" * 5000]
LINES += [b"Content-Transfer-Encoding: base64\r\n"]
JSON = [b"\\ud800", b'"', b"{", b"}", b",", b"0", b"\\u0000", b"\xc3\xa9", b"null", b"9" * 20, b'"__metadata__":{},']


def pax(*fields: bytes) -> bytes:
    lines = b""
    for field in fields:
        digits = next(it for it in range(1, 9) if len(str(len(field) + 2 + it)) == it)
        lines += b"%d %s\n" % (len(field) + 2 + digits, field)
    return lines


def sparse(files: dict[str, bytes]) -> bytes:
    """An archive whose files are of GNU's sparse kind: their headers list the places of what follows."""
    body = bytearray(archive(files, mtime=1))
    for at in [at for at in range(0, len(body), 512) if body[at + 257 : at + 262] == b"ustar"]:
        size = int(body[at + 124 : at + 135], 8)
        body[at + 156 : at + 157] = b"S"
        body[at + 386 : at + 410] = b"%011o\0%011o\0" % (4096, size)
        body[at + 483 : at + 495] = b"%011o\0" % (4096 + size)
        renewed(body, at)
    return bytes(body)


def renewed(body: bytearray, at: int) -> None:
    """Correct the checksum of the header at `at`."""
    if at + 512 <= len(body):
        body[at + 148 : at + 156] = b" " * 8
        body[at + 148 : at + 156] = b"%06o\0 " % sum(body[at : at + 512])


ARCHIVES: dict[str, tuple[bytes, str]] = {
    "sparse files": (sparse(FILES), "no file"),
    "a sparse file by pax": (header(pax(b"GNU.sparse.map=0,9"), b"x") + archive(FILES, mtime=1), "a sparse file"),
    "two archives": (archive(CONFIG_ONLY) + archive(WEIGHTS_ONLY), "ends in its midst"),
    "text after the end": (archive(FILES) + b"x" * 512, "ends in its midst"),
    "an end amid the files": (archive(CONFIG_ONLY)[:1024] + ZEROS + archive(WEIGHTS_ONLY), "ends in its midst"),
    "a name without a file": (header(b"x", b"L") + ZEROS * 2, "ends in its midst"),
    "a size of all files": (header(pax(b"size=9"), b"g") + archive(FILES, mtime=1), "of all files"),
    "a name after a path": (
        header(pax(b"path=x"), b"x") + header(b"adapter_config.json\0", b"L") + archive(FILES, mtime=1),
        "two names",
    ),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive_that_readers_read_differently_is_refused(take, case: str) -> None:
    body, found = ARCHIVES[case]
    with pytest.raises(InvalidAdapter, match=found):
        take(body, TAR)


@pytest.mark.parametrize(
    "before",
    [header(b"\0", b"K"), header(pax(b"comment=x"), b"g"), header(pax(b"path=a/README"), b"x") + header(b"\0", b"K")],
)
def test_records_of_links_and_of_all_files_change_no_name(tmp_path: Path, take, before: bytes) -> None:
    body = before + archive({"other": b"x" * 600, **FILES}, mtime=1)
    take(body, TAR)
    assert arrived(tmp_path) == read_tar(body)


def test_a_long_name_ends_at_its_first_nul(tmp_path: Path, take) -> None:
    take(header(b"adapter_config.json\0evil", b"L") + archive({"x": FILES[CONFIG_FILE], **WEIGHTS_ONLY}, mtime=1), TAR)
    assert arrived(tmp_path) == FILES


def read_tar(body: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as tar:
        for member in tar:
            name = member.name.rpartition("/")[2]
            if member.isreg() and is_of_adapter(name):
                content = tar.extractfile(member)
                assert content is not None
                assert name not in files
                files[name] = content.read()
                assert len(files[name]) == member.size
    return files


def changed_tar(random: random.Random) -> bytes:
    made = [archive({"README.md": b"x" * 700, **FILES}), archive(FILES, mtime=1), archive(FILES, folder=LONG)]
    made.append(archive(FILES, mtime=1, folder=LONG, format=tarfile.GNU_FORMAT))
    body = bytearray(random.choice(made))
    for _ in range(random.randrange(1, 4)):
        headers = [at for at in range(0, len(body), 512) if body[at + 257 : at + 262] == b"ustar"] or [0]
        at, block = random.choice(headers), 512 * random.randrange(len(body) // 512 + 1)
        match random.randrange(11):
            case 0:
                body[at + 156 : at + 157] = random.choice([bytes([it]) for it in b"0\x00123567SxgLKXAVDM"])
            case 1:
                body[at + 124 : at + 136] = random.choice(SIZES).ljust(12, b"\0")
            case 2:
                body[at : at + 100] = random.choice(FILE_NAMES).ljust(100, b"\0")
            case 3:
                body[at:at] = header(pax(*random.sample(PAX_FIELDS, 2)), random.choice([b"x", b"g", b"X"]))
            case 4:
                body[at:at] = header(random.choice(LONG_NAMES), random.choice([b"L", b"K"]))
            case 5:
                body[block:block] = ZEROS
            case 6:
                del body[block : block + 512]
            case 7:
                body[block:block] = body[at : at + 512]
            case 8:
                body += random.choice([b"junk", b"j" * 512, archive(FILES)])
            case 9:
                del body[random.randrange(len(body) + 1) :]
            case 10:
                body[at + 345 : at + 346] = bytes([random.randrange(256)])
        renewed(body, at)
    return bytes(body)


def read_parts(body: bytes) -> dict[str, bytes]:
    """The parts that a plain reading finds; raises ValueError where readings may differ."""
    files: dict[str, bytes] = {}
    first, *pieces = (b"\r\n" + body).split(f"\r\n--{BOUNDARY}".encode())
    for piece in pieces:
        if piece.startswith(b"--"):
            return files
        fields, blank, content = piece.partition(b"\r\n\r\n")
        names = re.findall(rb'filename="([^"\r\n]*)"', fields)
        is_plain = blank and len(names) == 1 and fields.count(b"\r\n") == 1 and fields.startswith(b"\r\n")
        if first.strip() or not is_plain:
            raise ValueError(piece)
        files[names[0].decode()] = content
    raise ValueError("no end")


def changed_parts(random: random.Random) -> bytes:
    tail = random.choice([b"", b"\r\n--b0und", b"\r\n--b0undary", b"\r\r\n--", b"\r\n", b"\r\n--b0undary-x"])
    body = bytearray(parts({**CONFIG_ONLY, WEIGHTS_FILE: FILES[WEIGHTS_FILE] + tail}))
    places = [it.start() for it in re.finditer(rb"--b0|\r\n\r\n|filename", body)]
    for _ in range(random.randrange(3)):
        at = max(0, random.choice(places) + random.randrange(-4, 14))
        body[at : at + random.randrange(6)] = random.choice([b"", *LINES])
    return bytes(body)


def changed_file(random: random.Random) -> bytes:
    end = 8 + int.from_bytes(ONE_FILE[:8], "little")
    head = bytearray(ONE_FILE[8:end])
    for _ in range(random.randrange(1, 3)):
        at = random.randrange(len(head))
        head[at : at + random.randrange(4)] = random.choice([b"", bytes([random.randrange(256)]), *JSON])
    says = random.choice([len(head)] * 6 + [0, 1, len(head) - 1, len(head) + 1, 1 << 63, 10**8])
    return says.to_bytes(8, "little") + bytes(head) + ONE_FILE[end : random.choice([None, None, None, -1])]


CHANGED: dict[str, tuple[str, Callable[[random.Random], bytes], Callable[[bytes], dict[str, bytes]]]] = {
    "archive": (TAR, changed_tar, read_tar),
    "parts": (PARTS, changed_parts, read_parts),
    "one file": ("", changed_file, lambda body: {WEIGHTS_FILE: body}),
}


@pytest.mark.parametrize("form", CHANGED)
def test_changed_bodies_are_refused_or_read_as_others_do(tmp_path: Path, take, form: str) -> None:
    """In whatever pieces it comes. Descriptors are closed too."""
    content_type, change, read = CHANGED[form]
    accepted, opened = 0, len(os.listdir("/proc/self/fd"))
    errors: list[InvalidAdapter] = []
    for seed in range(times(5_000, short=80)):
        body = change(random.Random(seed))
        found: list[dict[str, bytes] | None] = []
        for piece_bytes in (1 << 20, 37 + seed % 600):
            try:
                take(body, content_type, piece_bytes=piece_bytes)
                found.append(arrived(tmp_path))
            except InvalidAdapter as error:
                errors.append(error)
                found.append(None)
        assert found[0] == found[1], f"seed {seed}"
        if found[0] is not None:
            try:
                expected = read(body)
            except ValueError:
                continue
            accepted += 1
            if form == "one file":
                assert found[0].pop(CONFIG_FILE)
            assert found[0] == expected, f"seed {seed}"
    assert accepted
    assert all(error.found and error.expected and error.remedy for error in errors)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_header_of_many_tensors_takes_little_time(take) -> None:
    """8 million members once took 27 s and 1 GB of the API server; the process that verifies would refuse them."""
    members = b",".join(b'"%x":{}' % number for number in range(2_500_000))
    body = (len(members) + 2).to_bytes(8, "little") + b"{" + members + b"}"
    began_s = time.process_time()
    with pytest.raises(InvalidAdapter, match="more than 500000 tensors"):
        take(body, "", max_bytes=1 << 30, piece_bytes=1 << 20)
    assert time.process_time() - began_s < 4


def test_a_long_header_begins_with_its_configuration(tmp_path: Path, take) -> None:
    end = 8 + int.from_bytes(ONE_FILE[:8], "little")
    head = ONE_FILE[8:end].ljust(17 << 20)
    take(len(head).to_bytes(8, "little") + head + ONE_FILE[end:], "", max_bytes=1 << 30, piece_bytes=1 << 20)
    assert arrived(tmp_path)[CONFIG_FILE] == FILES[CONFIG_FILE]
