"""Finds and opens the files with an adapter's weights: a safetensors file, several with an index, or a pickle.

`open_weights` and `read_index` run in the reading process and in `lora-plugins inspect`; the API server's sources call
`shards_of`, to learn which files to fetch. In goes a directory, or the bytes of an index; out come open files with
their tensors, or names of files. A pickle is only named here, never opened.

The index is Transformers': `{"weight_map": {tensor: file}}` in `adapter_model.safetensors.index.json`, for files named
`adapter_model-00001-of-00002.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lora_plugins.adapter.files import open_regular, parse_json
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.safetensors_header import TensorInfo, read_header
from lora_plugins.errors import InvalidAdapter, describing

WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt")
MAX_INDEX_BYTES = 16 << 20
MAX_SHARDS = 256

_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_SHARD_IN_INDEX = re.compile(rb'"(adapter_model-\d{5}-of-\d{5}\.safetensors)"')
_LONGEST_SHARD = len('"adapter_model-00001-of-00002.safetensors"')
_PIECE_BYTES = 1 << 18

# A file, its size in bytes, and its tensors.
OpenWeights = tuple[BinaryIO, int, tuple[TensorInfo, ...]]


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def read_index(data: bytes) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        InvalidAdapter: the data is no index of such files.
    """
    check_index_size(len(data))
    try:
        files = parse_json(data)["weight_map"]
        if not isinstance(files, Mapping) or not files:
            raise ValueError("no weight_map")
        strange = [name for name in files.values() if not isinstance(name, str) or not is_shard(name)]
        if strange:
            raise ValueError(f"a file {str(strange[0])[:100]!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise _no_index(str(error)) from None
    check_shards(set(files.values()))
    return dict(files)


def check_index_size(size_bytes: int) -> None:
    """Refuse an index that is longer than the limit.

    Raises:
        InvalidAdapter: the index is longer.
    """
    if size_bytes > MAX_INDEX_BYTES:
        raise _no_index(f"more than {MAX_INDEX_BYTES} bytes")


def shards_of(index: bytes) -> list[str]:
    """Return the files that an index names, without parsing: only a process under limits may parse.

    Raises:
        InvalidAdapter: the index is too long, or names no file or too many.
    """
    check_index_size(len(index))
    found: set[bytes] = set()
    for begin in paced(range(0, len(index), _PIECE_BYTES)):
        # Pieces overlap by the longest name, so that no name is cut in two.
        found.update(_SHARD_IN_INDEX.findall(index, begin, begin + _PIECE_BYTES + _LONGEST_SHARD))
    if not found:
        raise _no_index("no weight_map")
    return check_shards(name.decode() for name in found)


def check_shards(names: Iterable[str]) -> list[str]:
    """Return the same names in order.

    Raises:
        InvalidAdapter: more than `MAX_SHARDS` names.
    """
    ordered = sorted(names)
    if len(ordered) > MAX_SHARDS:
        raise InvalidAdapter(
            f"{len(ordered)} files of weights",
            expected=f"at most {MAX_SHARDS}",
            remedy="save the adapter again, as one file",
            file=INDEX_FILE,
        )
    return ordered


def _no_index(why: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"an index that names no files ({why[:200]})",
        expected="a weight_map from tensors to adapter_model-00001-of-00002.safetensors and so on",
        remedy="save the adapter again, as one file",
        file=INDEX_FILE,
    )


@contextmanager
def open_weights(directory: Path, name: str) -> Iterator[list[OpenWeights]]:
    """Open the file of weights, or all files of the index `name`, and read the headers.

    Raises:
        AdapterNotFound: a file is missing.
        InvalidAdapter: a file is malformed, or holds other tensors than the index lists.
        SourceUnavailable: the file system denies or fails.
    """
    with ExitStack() as stack:
        if name != INDEX_FILE:
            file, size_bytes = stack.enter_context(open_regular(directory / name))
            yield [(file, size_bytes, read_header(file, size_bytes))]
            return
        with open_regular(directory / INDEX_FILE) as (file, _):
            index = read_index(file.read(MAX_INDEX_BYTES + 1))
        opened = []
        for shard in sorted(set(index.values())):
            file, size_bytes = stack.enter_context(open_regular(directory / shard))
            with describing(file=shard):
                tensors = tuple(replace(info, file=shard) for info in read_header(file, size_bytes))
                _check_index(shard, tensors, index)
            opened.append((file, size_bytes, tensors))
        yield opened


def _check_index(shard: str, tensors: tuple[TensorInfo, ...], index: Mapping[str, str]) -> None:
    found, wanted = {info.name for info in tensors}, {name for name, file in index.items() if file == shard}
    if found != wanted:
        strange = min(found ^ wanted)
        raise InvalidAdapter(
            f"{'a' if strange in found else 'no'} tensor '{strange[:200]}', other than {INDEX_FILE} says",
            expected=f"the {len(wanted)} tensors that it names for this file",
            remedy="copy all files of one save together",
        )
