"""Messages between a server and a reading process: MessagePack of known types, in short frames.

Never pickle: hostile bytes may have taken over the process that reads them. An answer is any number of
`PartOfAdapter`s, each with a few tensors, so that a server never decodes for more than a millisecond or two, and then
`Verified` or `Refused`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lora_plugins.adapter.chat import AddedToken, Chat
from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.adapter.safetensors_header import DTYPE_BYTES, TensorInfo
from lora_plugins.adapter.verify import VerifiedAdapter
from lora_plugins.adapter.weights import Beside, LoraPair, Weights
from lora_plugins.settings import AdapterChat, Settings

_T = TypeVar("_T")
# Bytes of the length before a frame, of a frame, and of a whole answer: larger numbers come from a process that hostile
# bytes control.
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 29
_TENSORS_IN_A_PART = 100
_NEW_TENSORS_IN_A_PART = 10  # of a layer's experts each
_PATTERNS_IN_A_PART = 20  # of up to 10,000 characters
_BYTES_IN_A_PART = 1 << 18


class Read(msgspec.Struct, frozen=True, tag=True):
    """Verify the adapter in a directory, without a base model, by these settings; `config_only` as `verify_config`."""

    directory: bytes
    max_adapter_bytes: int
    allow_pickle: bool
    check_finite: bool
    adapter_chat: AdapterChat
    config_only: bool = False

    @property
    def settings(self) -> Settings:
        """The settings with these values."""
        return Settings(
            # `store_dir` is not read here, and its default needs the home directory, which a user may lack.
            store_dir=Path(),
            max_adapter_bytes=self.max_adapter_bytes,
            allow_pickle=self.allow_pickle,
            check_finite=self.check_finite,
            adapter_chat=self.adapter_chat,
        )


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write the tensors of the following `count` messages to `target`, from the files of weights in `directory`."""

    directory: bytes
    target: bytes
    count: int
    largest_bytes: int


class Tensors(msgspec.Struct, frozen=True, tag=True):
    """Some of the tensors to write."""

    tensors: tuple[NewTensor, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class PartOfAdapter(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A part of the adapter that was read."""

    pairs: tuple[LoraPair, ...] = ()
    others: tuple[TensorInfo, ...] = ()
    beside: tuple[Beside, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    canonical: bytes = b""
    added: tuple[AddedToken, ...] = ()
    chat: Chat = Chat()  # without its added tokens


class Verified(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer; `config` is without patterns and targets, `name_in_keys` is of `Weights`."""

    config: AdapterConfig
    size_bytes: int
    notes: tuple[str, ...]
    has_weights: bool
    name_in_keys: str | None


class Landed(msgspec.Struct, frozen=True, tag=True):
    """The number of bytes written so far."""

    size_bytes: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer: everything is written."""


class WriteFailed(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer: the file system has failed."""

    errno: int
    strerror: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer: an error of ours, in the form of `plain()`."""

    error: dict[str, str]


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read, without its `target_modules`, and the configuration that engines read."""

    adapter: VerifiedAdapter
    canonical: bytes


Request = Read | Write | Tensors
Answer = Ready | PartOfAdapter | Verified | Landed | Written | WriteFailed | Refused
encode = msgspec.msgpack.Encoder().encode
decode_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def framed(data: bytes) -> bytes:
    """Return the data with its length before."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def requests_of(tensors: Sequence[NewTensor], directory: bytes, target: bytes) -> Iterator[Write | Tensors]:
    """Yield the messages that ask for these tensors to be written."""
    parts = [Tensors(some) for some in _some(tuple(tensors), _NEW_TENSORS_IN_A_PART)]
    sizes = (math.prod(tensor.info.shape) * DTYPE_BYTES[tensor.info.dtype] for tensor in tensors)
    yield Write(directory, target, len(parts), max(sizes, default=0))
    yield from parts


def answer_of(found: ReadAdapter) -> Iterator[PartOfAdapter | Verified]:
    """Yield the messages of an answer."""
    verified, canonical = found.adapter, found.canonical
    weights, config = verified.weights or Weights(()), verified.config
    items: Any
    for name, items, count in (
        ("pairs", weights.pairs, _TENSORS_IN_A_PART),
        ("others", weights.others, _TENSORS_IN_A_PART),
        ("beside", weights.beside, _TENSORS_IN_A_PART),
        ("ranks", tuple(config.rank_pattern.items()), _PATTERNS_IN_A_PART),
        ("alphas", tuple(config.alpha_pattern.items()), _PATTERNS_IN_A_PART),
        ("canonical", canonical, _BYTES_IN_A_PART),
        ("added", verified.chat.added_tokens, _TENSORS_IN_A_PART),
    ):
        for begin in range(0, len(items), count):
            yield PartOfAdapter(**{name: items[begin : begin + count]})
    yield PartOfAdapter(chat=replace(verified.chat, added_tokens=()))
    # Targets may be long, and a server never needs them: the canonical configuration has the targets.
    small = replace(config, targets=None, rank_pattern={}, alpha_pattern={})
    has_weights = verified.weights is not None
    yield Verified(small, verified.size_bytes, verified.notes, has_weights, weights.name_in_keys)


def found_of(parts: Sequence[PartOfAdapter], end: Verified) -> ReadAdapter:
    """Return the argument of `answer_of`, without the targets."""
    weights = Weights(
        tuple(pair for part in parts for pair in part.pairs),
        tuple(other for part in parts for other in part.others),
        end.name_in_keys,
        tuple(one for part in parts for one in part.beside),
    )
    config = replace(
        end.config,
        rank_pattern=dict(item for part in parts for item in part.ranks),
        alpha_pattern=dict(item for part in parts for item in part.alphas),
    )
    chat = replace(parts[-1].chat if parts else Chat(), added_tokens=tuple(it for part in parts for it in part.added))
    verified = VerifiedAdapter(config, weights if end.has_weights else None, end.size_bytes, end.notes, chat=chat)
    return ReadAdapter(verified, b"".join(part.canonical for part in parts))


def _some(items: tuple[_T, ...], count: int) -> Iterator[tuple[_T, ...]]:
    for begin in range(0, len(items), count):
        yield items[begin : begin + count]
