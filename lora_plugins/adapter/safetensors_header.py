"""Reads and checks the header of a safetensors file, without loading a tensor.

Runs in the reading process, in `lora-plugins inspect`, and in the API server for a pushed body, whose header is checked
while the rest still arrives. In goes an open file of untrusted bytes; out come the tensors' names, dtypes, shapes and
places (`TensorInfo`), or `InvalidAdapter`.

Format (huggingface/safetensors README): 8 bytes little-endian header length, a JSON object from tensor name to
`{"dtype", "shape", "data_offsets": [begin, end]}` with an optional `__metadata__`, then the tensors' bytes without
holes or overlaps.

The engine reads the header too, at each load. So the length of each member is bounded before parsing: a description
takes 150 bytes, PEFT's `__metadata__` 20.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, BinaryIO, TypeGuard

from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.writers import NOT_GATHERED, foreign_bytes
from lora_plugins.errors import InvalidAdapter

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_TENSORS = 500_000  # every expert of Kimi K2: 140,000
MAX_NAME_CHARACTERS = 512
MAX_METADATA_CHARACTERS = 1 << 20
_MAX_DESCRIPTION = 4096  # characters
_METADATA = "__metadata__"  # the only member that is no tensor
_QUANTISED = ("F8_", "F6_", "F4", "I", "U")
_THREE_KEYS = "dtype, shape and data_offsets, no more"

# Bytes per element of every dtype that a weight can have here.
DTYPE_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: its bytes lie from `begin` to `end`, counted from the start of `file` (empty for a single file)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str = ""

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements, by shape and dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def floats_of(bits: Any, dtype: str) -> Any:
    """Return the elements of a tensor of this dtype, an array of unsigned integers, as floats; bfloat16 as float32."""
    # numpy has no bfloat16: bfloat16 is the upper half of a float32.
    return (bits.astype("<u4") << 16).view("<f4") if dtype == "BF16" else bits.view(f"<f{DTYPE_BYTES[dtype]}")


def read_header(file: BinaryIO, file_bytes: int | None) -> tuple[TensorInfo, ...]:
    """Read the header at the start of `file`, of `file_bytes` bytes; return tensors in the order of their bytes.

    None stands for a size that is not known yet: the last tensor may end anywhere then.

    Raises:
        InvalidAdapter: anything that is not exactly a safetensors file of floating-point tensors.
    """
    if file_bytes is not None and file_bytes < LENGTH_BYTES:
        raise _broken(f"a file of {file_bytes} bytes", "a safetensors file")
    length = file.read(LENGTH_BYTES)
    header_bytes = int.from_bytes(length, "little")
    # Before the read, which allocates as many bytes as it is asked for: the length may be any number of 64 bits.
    if header_bytes > MAX_HEADER_BYTES or (file_bytes is not None and header_bytes > file_bytes - LENGTH_BYTES):
        raise foreign_bytes(length) or _broken(
            f"a header of {header_bytes} bytes in a file of {file_bytes}",
            f"a header that fits in the file and in {MAX_HEADER_BYTES} bytes",
        )
    data = file.read(header_bytes)
    if len(data) != header_bytes:
        raise _broken(f"{len(data)} of {header_bytes} header bytes", "the whole header")
    start = LENGTH_BYTES + header_bytes
    tensors = [_tensor(name, entry, start) for name, entry in paced(_members(data)) if name != _METADATA]
    if not tensors:
        raise InvalidAdapter("no tensors", expected="at least one pair of lora_A and lora_B", remedy=NOT_GATHERED)
    tensors.sort(key=attrgetter("begin"))
    _check_layout(tensors, start, file_bytes)
    return tuple(tensors)


def read_metadata(file: BinaryIO, most_bytes: int) -> dict[str, str]:
    """Return the texts of `__metadata__`, of a file whose header is still unchecked.

    Of a longer header only `most_bytes` are read: the safetensors library writes `__metadata__` first. Without
    `__metadata__` there, the answer is empty.

    Raises:
        InvalidAdapter: the header is no JSON object up to `__metadata__`.
    """
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _broken(f"a header of {header_bytes} bytes", f"at most {MAX_HEADER_BYTES}")
    members = _members(file.read(min(header_bytes, most_bytes)), is_cut=header_bytes > most_bytes)
    return next((value or {} for name, value in members if name == _METADATA), {})


def _members(data: bytes, *, is_cut: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the members of the header's JSON object, `__metadata__` checked, reading each member on demand.

    With `is_cut` the data may end anywhere in the header, and the last members are left out.

    `json.loads` itself would hold all members of a long object at once, and the interpreter's lock while freeing the
    members.
    """
    try:
        for name, value in _parsed_members(data.decode("utf-8", "ignore" if is_cut else "strict")):
            if name == _METADATA:
                _check_metadata(value)
            yield name, value
    except InvalidAdapter:
        raise
    except (ValueError, RecursionError):
        if not is_cut:
            raise _broken("a header that is not JSON", "a JSON header") from None


def _parsed_members(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of a JSON object; raise ValueError for a text that is no JSON, as `json.loads` does."""
    mark, at = _mark(text, 0)
    if mark != "{":
        raise _broken("a header that is not a JSON object", "a JSON object")
    names: set[str] = set()
    mark, at = _mark(text, at) if text.startswith("}", at) else (",", at)
    while mark == ",":
        if not text.startswith('"', at):
            raise ValueError(at)
        name, at = _DECODER.raw_decode(text, at)
        # JSON readers differ on duplicates: the engine could read another tensor than the one checked here.
        if name in names:
            raise _twice(name)
        names.add(name)
        if len(names) > MAX_TENSORS + 1:  # `__metadata__` may be one member more
            raise _broken(f"more than {MAX_TENSORS} tensors", f"at most {MAX_TENSORS}")
        mark, at = _mark(text, at)
        if mark != ":":
            raise ValueError(at)
        value, length = _value(name, text, at)
        yield name, value
        mark, at = _mark(text, at + length)
    if mark != "}" or at != len(text):
        raise ValueError(at)


def _mark(text: str, at: int) -> tuple[str, int]:
    """Return JSON's mark at `at`, or nothing, and the place behind the mark; spaces around the mark are passed over."""
    match = _MARK.match(text, at)
    return ("", at) if match is None else (match[1], match.end())


def _value(name: str, text: str, at: int) -> tuple[Any, int]:
    """Return a member's value at `at`, and its length; only as much text is parsed as the member may take."""
    what, expected, most = f"description of tensor '{name[:100]}'", _THREE_KEYS, _MAX_DESCRIPTION
    if name == _METADATA:
        what, expected, most = _METADATA, "a few texts", MAX_METADATA_CHARACTERS
    try:
        return _DECODER.raw_decode(text[at : at + most])
    except InvalidAdapter:
        raise
    except (ValueError, RecursionError):
        if at + most >= len(text):  # the text ends, not the bound
            raise
        raise _broken(f"no {what} within {most} characters", expected) from None


def _check_metadata(metadata: Any) -> None:
    texts = {} if metadata is None else metadata
    if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
        raise _broken("a __metadata__ that is not an object of texts", "texts only")
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _broken("half a character in __metadata__", "whole characters") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) != len({key for key, _ in pairs}):
        raise _twice(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return dict(pairs)


def _twice(name: str) -> InvalidAdapter:
    return _broken(f"'{name[:100]}' twice in the header", "each name once")


def _natural(digits: str) -> int:
    if digits.startswith("-"):  # the safetensors library refuses "-0" too
        raise ValueError(digits)
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_natural)
_MARK = re.compile(r"[ \t\n\r]*([{}:,]?)[ \t\n\r]*")


def _tensor(name: str, entry: Any, start: int) -> TensorInfo:
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise _broken(f"a tensor name of {len(name)} characters: {name[:60]!r}", "a module's name")
    if not isinstance(entry, dict) or len(entry) != 3:
        raise _broken(f"no description of tensor '{name}'", _THREE_KEYS)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        error = _broken(f"dtype {str(dtype)[:20]} of tensor '{name}'", "one of " + ", ".join(DTYPE_BYTES))
        if isinstance(dtype, str) and dtype.startswith(_QUANTISED):
            error.remedy = "save it in BF16; if these are quantised, multiply them by their scales before"
        raise error
    if not (_whole_numbers(shape) and all(shape) and 1 <= len(shape) <= 8):
        error = _broken(f"shape {str(shape)[:60]} of tensor '{name}'", "one to eight sizes above 0")
        if isinstance(shape, list) and 0 in shape:
            error.remedy = NOT_GATHERED
        raise error
    if not (_whole_numbers(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise _broken(f"data_offsets {str(offsets)[:60]} of tensor '{name}'", "a begin and an end")
    tensor = TensorInfo(name, dtype, tuple(shape), start + offsets[0], start + offsets[1])
    if tensor.end - tensor.begin != tensor.size_bytes:
        found = f"{tensor.end - tensor.begin} bytes for tensor '{name}'"
        raise _broken(found, f"{tensor.size_bytes}, by its shape and dtype")
    return tensor


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    # Below 2⁴⁸: products of sizes stay far from overflow in every reader. `type`, as a bool is an int too.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_layout(tensors: list[TensorInfo], start: int, file_bytes: int | None) -> None:
    expected = start
    for tensor in paced(tensors):
        # Bytes without an owner, or with two, could hide content from the checks.
        if tensor.begin != expected:
            raise _broken(f"tensor '{tensor.name}' at byte {tensor.begin}", f"byte {expected}, without hole or overlap")
        expected = tensor.end
    # Trailing bytes belong to no tensor, and safetensors refuses such a file too.
    if file_bytes not in (None, expected):
        raise _broken(f"{file_bytes} bytes in the file", f"{expected}, where the last tensor ends")


def _broken(found: str, expected: str) -> InvalidAdapter:
    remedy = "copy or download the file again, or save the adapter again with PEFT"
    return InvalidAdapter(found, expected=expected, remedy=remedy)
