"""Messages between a server and its reading process: MessagePack of known types, in short frames over a socket.

`reading_process.py` sends a `Request` and receives an `Answer`; `child.py` the other way round. `answer_of` and
`found_of` take an adapter apart into a message with lists, and put the adapter together again.

Never pickle: hostile bytes may have taken over the process that reads them. A request and an answer are a message after
any number of `Items`, each a few of the message's lists, so that a server never decodes for more than a
millisecond or two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.msgpack import Decoder, Encoder

from lora_plugins.adapter.chat import AddedToken, Chat
from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import VerifiedAdapter
from lora_plugins.adapter.weights import Beside, LoraPair, Weights
from lora_plugins.settings import AdapterChat, Settings

# The lists that cross with a message, by their fields of `Items`.
Lists = Mapping[str, Sequence[Any]]
NO_LISTS: Lists = MappingProxyType({})
# Bytes of a frame, and of a message with its lists: larger numbers come from a process that hostile bytes control.
_MAX_FRAME_BYTES = 1 << 20
_MAX_BYTES = 1 << 29
_PIECE_BYTES = 1 << 18
# Items in a message: patterns have up to 10,000 characters, and a new tensor may be made of a layer's experts.
_COUNTS = defaultdict(lambda: 100, ranks=20, alphas=20, tensors=10, pieces=1)


class Items(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Some items of one list."""

    pairs: tuple[LoraPair, ...] = ()
    others: tuple[TensorInfo, ...] = ()
    beside: tuple[Beside, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    added: tuple[AddedToken, ...] = ()
    tensors: tuple[NewTensor, ...] = ()
    pieces: tuple[bytes, ...] = ()
    landed: tuple[int, ...] = ()  # the bytes of a file written so far


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
    """Write the list `tensors` to `target`, from the files of weights in `directory`."""

    directory: bytes
    target: bytes
    memory_bytes: int  # beside what reading may take


class CallFunction(msgspec.Struct, frozen=True, tag=True):
    """Call a function of this package with the bytes of the list `pieces`, which returns bytes."""

    module: str
    function: str
    directory: bytes = b""  # no files: the least limits hold


class AdapterFound(msgspec.Struct, frozen=True, tag=True):
    """The adapter that was read, without its lists: tensors, patterns, added tokens, and the canonical `pieces`."""

    config: AdapterConfig
    weights: Weights | None
    chat: Chat
    size_bytes: int
    notes: tuple[str, ...]


class Written(msgspec.Struct, frozen=True, tag=True):
    """Everything is written, unless the file system has failed with an error."""

    errno: int = 0
    strerror: str = ""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The function has returned the bytes of the list `pieces`."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An error of ours, in the form of `plain()`, in JSON: paths in it may hold bytes that are no Unicode."""

    error: bytes


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read, without its `target_modules`, and the configuration that engines read."""

    adapter: VerifiedAdapter
    canonical: bytes


Request = Read | Write | CallFunction
Answer = AdapterFound | Written | Returned | Refused
decode_request: Decoder[Items | Request] = Decoder(Items | Request)
decode_answer: Decoder[Items | Answer] = Decoder(Items | Answer)
encode = Encoder().encode


def send(connection: Connection, message: Items | Request | Answer, lists: Lists = NO_LISTS) -> None:
    """Send a message, after its lists."""
    for name, items in lists.items():
        count = _COUNTS[name]
        for begin in range(0, len(items), count):
            connection.send_bytes(encode(Items(**{name: tuple(items[begin : begin + count])})))
    connection.send_bytes(encode(message))


def receive(
    connection: Connection, decoder: Decoder[Any], after_items: Callable[[Items], object] = lambda _: None
) -> tuple[Any, Lists]:
    """Return the next request or answer, which `decoder` decides, and its lists; call `after_items` after each `Items`.

    Raises:
        EOFError, OSError: no further message, or too long a message.
        ValueError, MsgspecError: a message of another form.
    """
    lists: dict[str, list[Any]] = {name: [] for name in Items.__struct_fields__}
    left_bytes = _MAX_BYTES
    while True:
        data = connection.recv_bytes(min(left_bytes, _MAX_FRAME_BYTES))
        left_bytes -= len(data)
        message = decoder.decode(data)
        if not isinstance(message, Items):
            return message, lists
        for name in lists:
            lists[name] += getattr(message, name)
        after_items(message)


def pieces(data: bytes) -> list[bytes]:
    return [data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES)]


def answer_of(found: ReadAdapter) -> tuple[AdapterFound, Lists]:
    """Return the message with an adapter, and its lists."""
    verified, config, chat = found.adapter, found.adapter.config, found.adapter.chat
    weights = verified.weights or Weights(())
    lists: Lists = {
        "pairs": weights.pairs,
        "others": weights.others,
        "beside": weights.beside,
        "ranks": tuple(config.rank_pattern.items()),
        "alphas": tuple(config.alpha_pattern.items()),
        "added": chat.added_tokens,
        "pieces": pieces(found.canonical),
    }
    # Targets may be long, and a server never needs them: the canonical configuration has the targets.
    small = replace(config, targets=None, rank_pattern={}, alpha_pattern={})
    empty = verified.weights and replace(weights, pairs=(), others=(), beside=())
    return AdapterFound(small, empty, replace(chat, added_tokens=()), verified.size_bytes, verified.notes), lists


def found_of(answer: AdapterFound, lists: Lists) -> ReadAdapter:
    """Return the argument of `answer_of`, without the targets."""
    pairs, others, beside = (tuple(lists[name]) for name in ("pairs", "others", "beside"))
    weights = answer.weights and replace(answer.weights, pairs=pairs, others=others, beside=beside)
    config = replace(answer.config, rank_pattern=dict(lists["ranks"]), alpha_pattern=dict(lists["alphas"]))
    chat = replace(answer.chat, added_tokens=tuple(lists["added"]))
    adapter = VerifiedAdapter(config, weights, answer.size_bytes, answer.notes, chat=chat)
    return ReadAdapter(adapter, b"".join(lists["pieces"]))
