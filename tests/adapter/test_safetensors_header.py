"""The safetensors header: whatever we let through, the safetensors library reads, and as the same tensors."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from lora_plugins.adapter.safetensors_header import (
    MAX_HEADER_BYTES,
    MAX_METADATA_CHARACTERS,
    TensorInfo,
    read_header,
    read_metadata,
)
from lora_plugins.errors import InvalidAdapter
from tests.make import header_of, weights, with_header
from tests.make import safetensors as saved

SMALL = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.ones((2, 1), "float16")}
FILE = saved(SMALL)
HEADER_BYTES = int.from_bytes(FILE[:8], "little")
DATA = FILE[8 + HEADER_BYTES :]


def read(data: bytes) -> tuple[TensorInfo, ...]:
    return read_header(io.BytesIO(data), len(data))


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def check(data: bytes) -> bool:
    """Whether we take these bytes; if so, the library must take them too, and see the same."""
    try:
        tensors = read(data)
    except InvalidAdapter:
        return False
    theirs = {
        name: (part["dtype"], tuple(part["shape"]), bytes(part["data"])) for name, part in safetensors.deserialize(data)
    }
    assert theirs == {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in tensors}
    return True


def test_tensors_are_found_at_their_bytes():
    a, b = read(FILE)
    start = 8 + HEADER_BYTES
    assert a == TensorInfo("a", "F32", (2, 3), start, start + 24)
    assert b == TensorInfo("b", "F16", (2, 1), start + 24, start + 28)
    assert FILE[a.begin : a.end] == SMALL["a"].tobytes()
    assert check(FILE)


def test_metadata_behind_a_long_header_s_cut_is_empty():
    assert read_metadata(io.BytesIO(FILE), 30) == {}


def test_tensors_come_in_the_order_of_their_bytes():
    reversed_header = dict(reversed(header_of(SMALL).items()))
    assert [tensor.name for tensor in read(with_header(reversed_header, DATA))] == ["a", "b"]


@pytest.mark.parametrize(("dtype", "size"), [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2)])
def test_floating_point_dtypes_are_read(dtype, size):
    assert check(with_header({"a": entry(dtype=dtype, shape=[1], data_offsets=[0, size])}, b"\0" * size))


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, None, {"tags": "x" * (MAX_METADATA_CHARACTERS - 20)}])
def test_metadata_of_texts_is_let_through(metadata):
    assert check(with_header({"__metadata__": metadata, **header_of(SMALL)}, DATA))


@pytest.mark.parametrize("metadata", [1, [], "x", {"a": 1}, {"a": None}, {"a": {}}, {"a": "\ud800"}, {"\ud800": ""}])
def test_other_metadata_is_refused(metadata):
    with pytest.raises(InvalidAdapter, match="__metadata__"):
        read(with_header({"__metadata__": metadata, **header_of(SMALL)}, DATA))


DTYPES = ["I64", "I8", "U8", "BOOL", "F8_E4M3", "f32", "", None, 1, ["F32"], {}]
SHAPES = [[], [0], [2, 0], [-2], [2.0], [True, 2], ["2"], None, 2, "2", {}, [1] * 9, [1 << 48], [2, None], [[2]]]
OFFSETS = [[], [0], [0, 8, 8], [8, 0], [0, 4], [0, 9], [-8, 0], [0.0, 8.0], None, "08", [False, 8], [0, 1 << 63]]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        *[(entry(dtype=dtype), "dtype") for dtype in DTYPES],
        *[(entry(shape=shape), None) for shape in SHAPES],
        *[(entry(data_offsets=offsets), None) for offsets in OFFSETS],
        *[(part, None) for part in (None, 1, "x", [], {}, {"dtype": "F32"}, entry(extra=1))],
    ],
)
def test_a_wrong_description_of_a_tensor_is_refused(part, says):
    with pytest.raises(InvalidAdapter, match=says):
        read(with_header({"a": part}, b"\0" * 8))


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        ([0, 0], "without hole or overlap"),  # both at the same bytes
        ([0, 4], "without hole or overlap"),  # half over each other
        ([0, 16], "without hole or overlap"),  # a hole between
        ([8, 16], "without hole or overlap"),  # a hole before
        ([0, 8], "where the last tensor ends"),  # bytes left over
    ],
)
def test_holes_overlaps_and_left_over_bytes_are_refused(begin, says):
    header = {name: entry(data_offsets=[at, at + 8]) for name, at in zip("ab", begin, strict=True)}
    with pytest.raises(InvalidAdapter, match=says):
        read(with_header(header, b"\0" * 24))


def test_a_name_or_key_that_stands_twice_is_refused():
    """Two readers may disagree about which of the two counts."""
    one = json.dumps(entry())
    for header, says in (
        (f'{{"the_name": {one}, "the_name": {one}}}', "'the_name' twice"),
        ('{"a":{"dtype":"F32","shape":[2],"shape":[1,2],"data_offsets":[0,8]}}', "'shape' twice"),
    ):
        with pytest.raises(InvalidAdapter, match=says):
            read(with_header(header.encode(), b"\0" * 8))


@pytest.mark.parametrize("name", ["a\nb", "\0", "\ud800", "\u202e", "a" * 513, "a\x1b[2J"], ids=ascii)
def test_a_name_that_no_module_has_is_refused(name):
    with pytest.raises(InvalidAdapter, match="tensor name"):
        read(with_header({name: entry()}, b"\0" * 8))


@pytest.mark.parametrize(
    "header",
    [
        *[b"", b"{", b"}", b"null", b"[]", b"7", b"{}", b'{"__metadata__":{}}', b"\xff\xfe", b"[" * 100_000],
        b'{"a":' * 2000,
        b"\xef\xbb\xbf" + json.dumps(header_of(SMALL)).encode(),
    ],
    ids=lambda header: str(header[:8]),
)
def test_a_header_that_describes_no_tensors_is_refused(header):
    with pytest.raises(InvalidAdapter):
        read(with_header(header, DATA))


@pytest.mark.parametrize("length", [HEADER_BYTES + len(DATA) + 1, MAX_HEADER_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_not_read(length):
    with pytest.raises(InvalidAdapter, match=f"header of {length} bytes"):
        read(length.to_bytes(8, "little") + FILE[8:])


class _NoMore(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        assert size == 8, "the header was read although it is too long"
        return super().read(size)


def test_a_header_over_the_limit_is_not_read_into_memory():
    # The file claims to be large enough for it.
    with pytest.raises(InvalidAdapter, match="header"):
        read_header(_NoMore((MAX_HEADER_BYTES + 1).to_bytes(8, "little")), 1 << 40)


@pytest.mark.parametrize("length", [0, 4, 8, 20])
def test_a_file_that_shrinks_while_it_is_read_is_refused(length):
    with pytest.raises(InvalidAdapter):
        read_header(io.BytesIO(FILE[:length]), len(FILE))


def test_a_header_that_shrinks_within_its_padding_is_refused():
    # Its JSON is whole, so only the count of bytes shows it.
    header = json.dumps(header_of(SMALL)).encode()
    file = with_header(header + b" " * 8, DATA)
    with pytest.raises(InvalidAdapter, match=f"{len(header)} of {len(header) + 8} header bytes"):
        read_header(io.BytesIO(file[: 8 + len(header)]), len(file))


def test_every_truncation_is_refused():
    file = saved(weights())
    for length in range(len(file)):
        with pytest.raises(InvalidAdapter):
            read(file[:length])


def test_every_changed_header_byte_reads_as_in_the_library():
    taken = 0
    values = {*range(0x20, 0x7F), 0, 1, 0x0A, 0x7F, 0x80, 0xC3, 0xFF}
    for position in range(8 + HEADER_BYTES):
        for value in values:
            taken += check(FILE[:position] + bytes([value]) + FILE[position + 1 :])
    # Some changes are harmless (another letter in a name), most are not.
    assert 0 < taken < (8 + HEADER_BYTES) * len(values) / 4


@given(st.integers(0, len(FILE)), st.integers(0, len(FILE)), st.binary(max_size=12))
@example(0, len(FILE), b"\x02\0\0\0\0\0\0\0{}")
def test_replaced_stretches_read_as_in_the_library(one, other, replacement):
    begin, end = sorted((one, other))
    check(FILE[:begin] + replacement + FILE[end:])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]), JSON)
@example("shape", -0.0)
def test_any_json_description_reads_as_in_the_library(key, value):
    check(with_header({"a": entry(**{key: value})}, b"\0" * 8))


@pytest.mark.parametrize(
    "offsets",
    ["[-0,8]", "[0,8.0]", "[0,8e0]", "[0,+8]", "[0,08]", "[0,8,]", "[NaN,8]", "[0,Infinity]", "[0,8]//"],
)
def test_numbers_that_the_library_does_not_read_are_refused(offsets):
    header = f'{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}'.encode()
    assert not check(with_header(header, b"\0" * 8))


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with the length of each text that is handed to the parser to read a value from its start."""
    lengths: list[int] = []
    decode = json.JSONDecoder.raw_decode

    def counted(self, text, at=0):
        lengths.extend([] if at else [len(text)])
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    return lengths


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ('"__metadata__":{' + ",".join(f'"{n}":"x"' for n in range(200_000)) + "}", "no __metadata__ within"),
        ('"__metadata__":{"a":"' + "x" * MAX_METADATA_CHARACTERS + '"}', "no __metadata__ within"),
        ('"b":{"dtype":"F32","shape":[' + "1," * 500_000 + '1],"data_offsets":[0,8]}', "no description of tensor 'b'"),
        ('"b":' + "[" * 500_000, "no description of tensor 'b'"),
    ],
    ids=range(4),
)
def test_a_long_member_is_refused_unparsed(member, says, monkeypatch):
    lengths = parsed(monkeypatch)
    with pytest.raises(InvalidAdapter, match=says):
        read(with_header(f'{{{member},"a":{json.dumps(entry())}}}'.encode(), b"\0" * 8))
    assert max(lengths) <= MAX_METADATA_CHARACTERS
