"""What an adapter brings for chats beside its weights: a template, special and added tokens, and what ends an answer.

Trainers save them in Transformers' files. A template is a program in Jinja: nothing here runs or parses the template;
Transformers renders templates in a sandbox. Added tokens are in `tokenizer.json`, and until Transformers 5 in
`tokenizer_config.json` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lora_plugins.adapter.files import open_regular, parse_json
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, describing

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
VOCABULARY_FILE = "tokenizer.json"
# Far above real files: those of Llasa have 11.7 MB and 18 MB, with 65,800 added tokens; Gemma 3's vocabulary has 33 MB.
MAX_BYTES = {TEMPLATE_FILE: 256 << 10, TOKENIZER_FILE: 32 << 20, GENERATION_FILE: 1 << 20, VOCABULARY_FILE: 128 << 20}
CHAT_FILES = tuple(MAX_BYTES)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Transformers' names of a template, and of the template for requests with tools.
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
_MOST_END_IDS, _LONGEST_TOKEN, _VOCABULARY = 100, 1000, 1 << 31  # the second in bytes
# In one file, the base model's own too; of tokens that the base model lacks a server takes fewer.
_MOST_ADDED, _ADDED_BYTES = 100_000, 4 << 20
_NAMED = 3  # tokens in a message
# `tokenizer.json` begins with the added tokens, before a vocabulary that nothing here needs; 65,800 tokens have 13 MB.
_HEADS_BYTES = (4 << 20, 48 << 20)
_ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
_BEGIN = re.compile(r"[^\s,]")
_ID = re.compile(r"[0-9]{1,10}")
_TRAITS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that never is cut in parts; `traits` are those of Transformers' `AddedToken` that are true."""

    id: int
    text: str
    traits: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.text!r} ({self.id})"

    def entry(self) -> dict[str, Any]:
        """The token as an entry of `added_tokens` in `tokenizer.json`."""
        return {"id": self.id, "content": self.text, **{trait: trait in self.traits for trait in _TRAITS}}


@dataclass(frozen=True, slots=True)
class Chat:
    """What an adapter brings for chats; empty for an adapter that brings nothing.

    Attributes:
        template: the chat template. tool_template: another template, for requests with tools.
        special_tokens: texts of special tokens by their names in templates (`bos_token`).
        end_ids: ids of the tokens that end an answer, beside `eos_token` of `special_tokens`.
        added_tokens: by their ids. As read, all of the adapter's tokenizer; as served, those that the base model lacks.
        lost_tokens: those that the base model lacks, and that the server cannot add to the base model's tokenizer.
    """

    template: str | None = None
    tool_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    lost_tokens: tuple[AddedToken, ...] = ()

    @property
    def warning(self) -> str | None:
        """What a client should know of the adapter's tokens."""
        if not self.lost_tokens:
            return None
        return f"the base model's tokenizer cuts tokens that the adapter adds into pieces: {few(self.lost_tokens)}"

    def template_for(self, *, has_tools: bool) -> str | None:
        """Return the template of a request with or without tools; None where the adapter has no template."""
        return self.tool_template if has_tools and self.tool_template is not None else self.template


def chat_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of files for chats among the names of an adapter's files, in one order."""
    present = set(names)
    return tuple(name for name in CHAT_FILES if name in present)


def read_chat(directory: Path) -> Chat:
    """Read the files in `directory`; without the files, the answer is empty.

    Raises:
        InvalidAdapter: a file is too large, or not what Transformers writes.
        SourceUnavailable: the file system denies or fails.
    """
    config = _read(directory, TOKENIZER_FILE, _object) or {}
    # The file comes before the key, as in Transformers 5.
    template = _read(directory, TEMPLATE_FILE, _text)
    with describing(file=TOKENIZER_FILE):
        templates = _templates(config.get("chat_template")) if template is None else {_DEFAULT: template}
        special_tokens = {name: _token(config[name]) for name in _SPECIAL if config.get(name) is not None}
    generation = _read(directory, GENERATION_FILE, _object) or {}
    with describing(file=GENERATION_FILE):
        end_ids = _ids(generation.get("eos_token_id"))
    # As Transformers has it, the configuration's tokens come after the vocabulary's.
    with describing(file=TOKENIZER_FILE):
        decoder = _kept(config.get("added_tokens_decoder") or {}, dict, "added_tokens_decoder")
        entries = [{"id": int(key) if _ID.fullmatch(key) else key, **_entry(value)} for key, value in decoder.items()]
        of_config = _added(entries)
    added = {token.id: token for token in (*(_read(directory, VOCABULARY_FILE, _head) or ()), *of_config)}
    added_tokens = tuple(added[token] for token in sorted(added))
    return Chat(templates.get(_DEFAULT), templates.get(_FOR_TOOLS), special_tokens, end_ids, added_tokens)


def few(tokens: Sequence[AddedToken]) -> str:
    """Name the last tokens, which trainers have added after the base model's."""
    named = ", ".join(map(str, tokens[-_NAMED:]))
    return named if len(tokens) <= _NAMED else f"{named} and {len(tokens) - _NAMED} more"


def check_chat_size(name: str, size_bytes: int) -> None:
    """Refuse a file that is longer than the limit.

    Raises:
        InvalidAdapter: the file is longer.
    """
    if size_bytes > MAX_BYTES[name]:
        with describing(file=name):
            raise _broken(f"{size_bytes} bytes", f"at most {MAX_BYTES[name]}")


def _read(directory: Path, name: str, parsed: Callable[[BinaryIO], _T]) -> _T | None:
    try:
        with open_regular(directory / name) as (file, size_bytes), describing(file=name):
            check_chat_size(name, size_bytes)
            return parsed(file)
    except AdapterNotFound:
        return None


def _text(file: BinaryIO) -> str:
    try:
        return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _broken(f"text that stops being UTF-8 at byte {error.start}", "UTF-8") from None


def _object(file: BinaryIO) -> Mapping[str, Any]:
    try:
        found = parse_json(file.read())
    except ValueError as error:
        raise _broken(str(error), "JSON") from None
    return _kept(found, dict, "the file")


def _head(file: BinaryIO) -> tuple[AddedToken, ...]:
    data = b""
    for read_bytes in _HEADS_BYTES:
        data += file.read(read_bytes - len(data))
        text = data.decode("utf-8-sig", errors="ignore")  # may end within a character
        if (found := _ADDED.search(text)) is None:
            return ()
        try:
            return _added(_entries(text, found.end()))
        except InvalidAdapter:
            raise
        except (ValueError, RecursionError) as error:
            if len(data) < read_bytes:  # else the end of what was read here may be at fault
                raise _broken(f"no JSON in added_tokens ({str(error)[:200]})", "JSON") from None
    raise _broken(f"added_tokens of more than {len(data)} bytes", "fewer")


def _entries(text: str, place: int) -> Iterator[object]:
    """Each entry of a list by itself, so that a long list takes little memory."""
    decode = json.JSONDecoder().raw_decode
    while (begin := _BEGIN.search(text, place)) is not None and begin.group() != "]":
        entry, place = decode(text, begin.start())
        yield entry
    if begin is None:
        raise ValueError("a list without its end")


def _added(entries: Iterable[object]) -> tuple[AddedToken, ...]:
    tokens, text_bytes = [], 0
    for entry in map(_entry, entries):
        (token,) = _ids([entry.get("id")])
        traits = frozenset(trait for trait in _TRAITS if entry.get(trait) is True)
        tokens.append(AddedToken(token, _token(entry), traits))
        text_bytes += len(tokens[-1].text.encode())
        if len(tokens) > _MOST_ADDED or text_bytes > _ADDED_BYTES:
            raise _broken(
                f"more than {len(tokens) - 1} added tokens of {text_bytes} bytes",
                f"at most {_MOST_ADDED}, of {_ADDED_BYTES} bytes",
            )
    return tuple(tokens)


def _entry(value: object) -> dict[str, Any]:
    return _kept(value, dict, "an added token")


def _templates(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: _template(value)}
    items = [_kept(item, dict, "an entry of chat_template") for item in _kept(value, list, "chat_template")]
    return {str(item.get("name")): _template(item.get("template")) for item in items}


def _template(value: object) -> str:
    return _short(_kept(value, str, "a template of chat_template"), MAX_BYTES[TEMPLATE_FILE])


def _token(value: object) -> str:
    # Transformers writes a token with more properties than its text as an object.
    text = _kept(value.get("content") if isinstance(value, dict) else value, str, "a special token")
    return _short(text, _LONGEST_TOKEN)


def _short(text: str, longest: int) -> str:
    data = text.encode(errors="ignore")  # without halves of surrogate pairs, which JSON can name
    if len(data) > longest or data.decode() != text:
        raise _broken(f"a text of {len(text)} characters", f"at most {longest} bytes of UTF-8")
    return text


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    found = value if isinstance(value, list) else [value]
    if len(found) > _MOST_END_IDS or not all(type(item) is int and 0 <= item < _VOCABULARY for item in found):
        raise _broken(f"eos_token_id {str(value)[:100]}", "the id of a token, or a list of ids")
    return tuple(found)


def _kept(value: object, kind: type[_T], what: str) -> _T:
    if not isinstance(value, kind):
        raise _broken(f"{what} of kind {type(value).__name__}", kind.__name__)
    return value


def _broken(found: str, expected: str) -> InvalidAdapter:
    return InvalidAdapter(
        found,
        expected=expected,
        remedy="save the tokenizer beside the adapter again, remove the file, or set LORA_PLUGINS_ADAPTER_CHAT=base to "
        "serve all adapters with the base model's template and tokens",
    )
