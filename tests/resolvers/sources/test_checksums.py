"""Checksums of whole objects: against published values, zlib, and a real S3 API whose answers change on their way."""

from __future__ import annotations

import base64
import os
import zlib

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.checksums import Checksum
from testbed import faults
from tests.resolvers.sources.object_bed import Bed, read

MIB = 1 << 20
DATA = os.urandom(5 * MIB + 100_001)
WEIGHTS_PATH = r"\.safetensors"


def crc_of(name: str, *pieces: bytes) -> str:
    crc = Checksum(name, "", "").digest()
    for piece in pieces:
        crc.update(memoryview(piece))
    return crc.hexdigest()


@pytest.mark.parametrize(
    ("name", "check"), [("CRC32", "cbf43926"), ("CRC32C", "e3069283"), ("CRC64NVME", "ae8b14860a799888")]
)
def test_a_crc_has_its_published_check_value(name: str, check: str) -> None:
    assert crc_of(name, b"123456789") == crc_of(name, b"1234", b"", b"56789") == check


def test_only_a_checksum_of_the_whole_object_counts() -> None:
    value = base64.b64encode(bytes(range(4))).decode()
    full = {"ChecksumType": "FULL_OBJECT", "ChecksumCRC32": value}
    assert Checksum.of_answer(full) == Checksum("CRC32", "00010203", "the object's checksum")
    assert Checksum.of_answer({**full, "ChecksumType": "COMPOSITE", "ChecksumCRC32": f"{value}-2"}) is None
    assert Checksum.of_answer({"ChecksumCRC32": value}) is None
    assert Checksum.of_answer({**full, "ChecksumCRC32": "?"}) is None
    assert Checksum.of_answer({"ChecksumType": "FULL_OBJECT", "ChecksumCRC64NVME": value}) is None, "too short"
    assert Checksum.of_answer({}) is None


def put(bed: Bed, checksum: str = "CRC32") -> str:
    """An adapter whose weights were uploaded in two parts; their ETag."""
    bed.bucket.put("loras/sql/" + CONFIG_FILE, b"{}")
    etag = bed.bucket.put("loras/sql/" + WEIGHTS_FILE, DATA, part_size=5 * MIB, checksum=checksum)
    assert etag.endswith('-2"')
    return etag


def say(bed: Bed, etag: str, **checksum: str) -> None:
    """Answer HEADs with these checksums of the whole object: moto computes no CRC-64 and no CRC-32C by itself."""
    headers = {f"x-amz-checksum-{name.lower()}": value for name, value in checksum.items()}
    headers |= {"ETag": etag, "x-amz-checksum-type": "FULL_OBJECT"}
    bed.proxy.plan(faults.status(200, headers=headers), method="HEAD", times=None)


@pytest.mark.parametrize(("at", "checksum"), [(0, "SHA256"), (3 * MIB, "CRC32"), (len(DATA) - 1, "CRC32")])
def test_a_byte_changed_on_the_way_is_fetched_again(bed: Bed, at: int, checksum: str) -> None:
    put(bed, checksum)
    bed.proxy.plan(faults.flip(at, in_object=True), path=WEIGHTS_PATH, method="GET")
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA
    assert bed.proxy.bytes_sent(WEIGHTS_PATH) == 2 * len(DATA), "the file was fetched once more"
    assert bed.proxy.count("HEAD") == 1, "of the weights alone: the configuration has an MD5"
    bed.assert_clean()


def test_bytes_changed_twice_are_refused_and_never_served(bed: Bed) -> None:
    put(bed)
    bed.proxy.plan(faults.flip(3 * MIB, in_object=True), path=WEIGHTS_PATH, method="GET", times=None)
    with pytest.raises(SourceUnavailable, match=r"bytes with CRC32 \w{8}, twice.*the object's checksum") as caught:
        bed.serve(bed.source())
    assert (caught.value.http_status, caught.value.file) == (503, WEIGHTS_FILE)
    assert f"{zlib.crc32(DATA):08x}" in caught.value.expected
    assert list(bed.store.layout.digests()) == []
    bed.assert_clean()
    bed.proxy.clear()
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA


@pytest.mark.parametrize("name", ["CRC64NVME", "CRC32C"])
def test_crcs_beyond_the_standard_library_are_compared(bed: Bed, name: str) -> None:
    etag = put(bed)
    say(bed, etag, **{name: base64.b64encode(bytes.fromhex(crc_of(name, DATA))).decode()})
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA
    bed.proxy.plan(faults.flip(MIB, in_object=True), path=WEIGHTS_PATH, method="GET", times=None)
    bed.bucket.put("loras/sql/" + CONFIG_FILE, b'{"r": 8}')
    with pytest.raises(SourceUnavailable, match=f"bytes with {name}"):
        bed.serve(bed.source())


def test_an_object_without_a_full_checksum_is_served(bed: Bed) -> None:
    put(bed, "")
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA


def test_a_denied_head_leaves_the_bytes_unchecked(bed: Bed) -> None:
    put(bed)
    bed.proxy.plan(faults.denied(), method="HEAD", times=None)
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA


def test_a_failing_head_is_asked_again(bed: Bed) -> None:
    put(bed)
    bed.proxy.plan(faults.server_error(), method="HEAD", times=2)
    assert read(bed.serve(bed.source()))[WEIGHTS_FILE] == DATA
    assert bed.proxy.count("HEAD") == 3


def test_a_new_version_before_the_head_is_located_again(bed: Bed) -> None:
    put(bed)
    say(bed, '"other-2"', CRC32="AAAAAA==")
    with pytest.raises(SourceUnavailable, match="changed meanwhile"):
        bed.serve(bed.source())


def test_single_part_objects_cost_no_head(bed: Bed) -> None:
    bed.put()
    bed.serve(bed.source())
    assert bed.proxy.count("HEAD") == 0


def test_checks_that_are_off_ask_for_no_checksum(bed: Bed) -> None:
    put(bed)
    bed.proxy.plan(faults.flip(MIB, in_object=True), path=WEIGHTS_PATH, method="GET", times=None)
    assert read(bed.serve(bed.source(check_md5=False)))[WEIGHTS_FILE] != DATA
    assert bed.proxy.count("HEAD") == 0
