"""Hostile bodies: refused as bodies of pushes are, or exactly the files that safetensors or HTTP read."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter
from tests.api.test_push_body import BOUNDARY, FILES, FORMS, ONE_FILE, arrived, parts, take
from tests.repetitions import times

__all__ = ["take"]  # the fixture

PARTS = FORMS["parts"][0]
LINES = [b"\r", b"\n", b"\r\n", b"--", b"--b0undary", b"\r\n--b0undary--", b"\r\n--b0undary\r\n", b"\0", b"\xff", b": "]
LINES += [
    b"\r\n\r\n",
    b'filename="adapter_config.json"',
    b"A: " + b"x" * 5000,
    b"Content-Transfer-Encoding: base64\r\n",
]
JSON = [b"\\ud800", b'"', b"{", b"}", b",", b"0", b"\\u0000", b"\xc3\xa9", b"null", b"9" * 20, b'"__metadata__":{},']


def read_parts(body: bytes) -> dict[str, bytes]:
    """The parts that a plain reading finds; raises ValueError where readings may differ."""
    files: dict[str, bytes] = {}
    first, *pieces = (b"\r\n" + body).split(f"\r\n--{BOUNDARY}".encode())
    for piece in pieces:
        if piece.startswith(b"--"):
            return files
        fields, blank, content = piece.partition(b"\r\n\r\n")
        names = re.findall(rb'filename="([^"\r\n]*)"', fields)
        if (
            first.strip()
            or not blank
            or len(names) != 1
            or fields.count(b"\r\n") != 1
            or not fields.startswith(b"\r\n")
        ):
            raise ValueError(piece)
        files[names[0].decode()] = content
    raise ValueError("no end")


def changed_parts(random: random.Random) -> bytes:
    tail = random.choice([b"", b"\r\n--b0und", b"\r\n--b0undary", b"\r\r\n--", b"\r\n", b"\r\n--b0undary-x"])
    body = bytearray(parts({CONFIG_FILE: FILES[CONFIG_FILE], WEIGHTS_FILE: FILES[WEIGHTS_FILE] + tail}))
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
    "parts": (PARTS, changed_parts, read_parts),
    "one file": ("", changed_file, lambda body: {WEIGHTS_FILE: body}),
}


@pytest.mark.parametrize("form", CHANGED)
def test_changed_bodies_are_refused_or_read_as_others_do(tmp_path: Path, take, form: str) -> None:
    """In whatever pieces it comes. Descriptors are closed too."""
    content_type, change, read = CHANGED[form]
    accepted, opened = 0, len(os.listdir("/proc/self/fd"))
    errors: list[InvalidAdapter] = []
    for seed in range(times(5_000, short=200)):
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


def test_a_header_of_100_mb_takes_little_time(take) -> None:
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
