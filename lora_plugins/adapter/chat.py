"""Reads what an adapter brings for chats beside its weights: a template, special and added tokens, ends of answers.

`read_chat` runs in the reading process and in `lora-plugins inspect`. In goes a directory with Transformers' files,
untrusted; out comes a `Chat`. A file or key that cannot be used is named in `Chat.unused`, and does not keep the
adapter from being served. The API server applies the `Chat` (`vllm_patches/api_server/adapter_chats.py`).

A template is a program in Jinja: nothing here runs or parses the template; Transformers renders templates in a sandbox.
Added tokens are in `tokenizer.json`, and until Transformers 5 in `tokenizer_config.json` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lora_plugins.adapter.files import open_regular, parse_json
from lora_plugins.errors import AdapterNotFound, InvalidAdapter

TEMPLATE_FILE = "chat_template.jinja"
TOOLS_FILE = "additional_chat_templates/tool_use.jinja"  # other files in the folder are never chosen for a request
TOKENIZER_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
VOCABULARY_FILE = "tokenizer.json"
# Files of old releases; Transformers reads them where the configuration of the tokenizer lists no tokens.
SPECIAL_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
# Files of processors (of images, audio), which no tokenizer reads.
PROCESSOR_FILE = "processor_config.json"
_UNREAD_FILES = ("chat_template.json", PROCESSOR_FILE)
# Far above real files: those of Llasa have 11.7 MB and 18 MB, with 65,800 added tokens; Gemma 3's vocabulary has 33 MB.
_JSON_FILES = (TOKENIZER_FILE, GENERATION_FILE, SPECIAL_FILE, ADDED_FILE, *_UNREAD_FILES)
MAX_BYTES = dict.fromkeys((TEMPLATE_FILE, TOOLS_FILE), 256 << 10) | dict.fromkeys(_JSON_FILES, 32 << 20)
MAX_BYTES[VOCABULARY_FILE] = 128 << 20
CHAT_FILES = tuple(MAX_BYTES)
# A forbidden link in the place of one of these files leaves the file out, and does not refuse the adapter.
MINOR_FILES = frozenset({TOOLS_FILE, SPECIAL_FILE, ADDED_FILE, *_UNREAD_FILES})

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Transformers' names of a template, and of the template for requests with tools.
_KINDS = _DEFAULT, _FOR_TOOLS = "default", "tool_use"
_MOST_END_IDS, _LONGEST_TOKEN, _VOCABULARY = 100, 1000, 1 << 31  # `_LONGEST_TOKEN` in bytes
# Added tokens in one file, among them the base model's own. Of tokens that the base model lacks, a server takes fewer.
_MOST_ADDED, _ADDED_BYTES = 100_000, 4 << 20
_NAMED = 3  # tokens that a message names
# How much of `tokenizer.json` is read at first, and at most: the file begins with the added tokens, before a vocabulary
# that nothing here needs. 65,800 tokens have 13 MB.
_HEADS_BYTES = (4 << 20, 48 << 20)
_ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
_POST_PROCESSOR, _POST_PROCESSOR_BYTES = re.compile(r'"post_processor"\s*:\s*'), 1 << 16
_BEGIN = re.compile(r"[^\s,]")
_ID = re.compile(r"[0-9]{1,10}")
_DECODER = "added_tokens_decoder"
_TRAITS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_T = TypeVar("_T")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is never cut into parts; `traits` names the flags of Transformers' `AddedToken` that are true."""

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
        templates: chat templates by Transformers' names: `default`, and `tool_use` for requests with tools.
        special_tokens: texts of special tokens by their names in templates (`bos_token`).
        end_ids: ids of the tokens that end an answer, beside `eos_token` of `special_tokens`.
        added_tokens: in the order of their ids. As read from files, all added tokens of the adapter's tokenizer; as
            served (`served_chat`), only tokens that the base model lacks.
        lost_tokens: tokens that the base model lacks, and that the server cannot add to the base model's tokenizer.
        unused: names of files and keys that are not used, and why.
        post_processor: the post-processor of `tokenizer.json`, as JSON: it puts special tokens around the tokens of a
            text. Empty for none; as served, empty also where the base model's puts the same tokens.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    lost_tokens: tuple[AddedToken, ...] = ()
    unused: tuple[str, ...] = ()
    post_processor: str = ""

    @property
    def warning(self) -> str | None:
        """What a client should know of the adapter's files for chats."""
        lost = "the base model's tokenizer cuts tokens that the adapter adds into pieces: "
        texts = [lost + few(self.lost_tokens)] if self.lost_tokens else []
        texts += [f"not used of the adapter's files for chats: {', '.join(self.unused)}"] if self.unused else []
        return "; ".join(texts) or None

    def template_for(self, *, has_tools: bool) -> str | None:
        """Return the template of a request with or without tools; None where the adapter has no template."""
        return self.templates.get(_FOR_TOOLS if has_tools and _FOR_TOOLS in self.templates else _DEFAULT)


def chat_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of files for chats among the names of an adapter's files, in one order."""
    present = set(names)
    return tuple(name for name in CHAT_FILES if name in present)


def read_chat(directory: Path) -> Chat:
    """Read the files in `directory`; without the files, the answer is empty. Values of an unknown form are unused.

    Raises:
        SourceUnavailable: the file system denies or fails.
    """
    reader = _Reader(directory)
    config, generation = reader.file(TOKENIZER_FILE, _object) or {}, reader.file(GENERATION_FILE, _object) or {}
    # A template in a file wins over the key `chat_template`, as in Transformers 5.
    named = {_DEFAULT: reader.file(TEMPLATE_FILE, _text), _FOR_TOOLS: reader.file(TOOLS_FILE, _text)}
    of_files = {kind: text for kind, text in named.items() if text is not None}
    texts = {name: reader.key(config, name, TOKENIZER_FILE, _token) for name in _SPECIAL}
    of_old: tuple[AddedToken, ...] = ()
    if _DECODER not in config:
        special = reader.file(SPECIAL_FILE, _object) or {}
        texts |= {name: reader.key(special, name, SPECIAL_FILE, _token) for name in _SPECIAL if name in special}
        of_old = reader.file(ADDED_FILE, lambda file: _ids_by_text(_object(file), {*texts.values()})) or ()
    # For one id the last entry wins, as in Transformers: the configuration's token, then the vocabulary's, then the old
    # files'.
    of_vocabulary, post_processor = reader.file(VOCABULARY_FILE, _head) or ((), "")
    of_config = reader.key(config, _DECODER, TOKENIZER_FILE, _decoder) or ()
    added = {token.id: token for token in (*of_old, *of_vocabulary, *of_config)}
    unread = [f"{name} (of a processor)" for name in _UNREAD_FILES if (directory / name).exists()]
    return Chat(
        templates=of_files or reader.key(config, "chat_template", TOKENIZER_FILE, _templates) or {},
        special_tokens={name: text for name, text in texts.items() if text is not None},
        end_ids=reader.key(generation, "eos_token_id", GENERATION_FILE, _ids) or (),
        added_tokens=tuple(added[token] for token in sorted(added)),
        unused=(*reader.unused, *unread),
        post_processor=post_processor,
    )


def few(tokens: Sequence[AddedToken]) -> str:
    """Return a text that names the last tokens: trainers add their tokens after the base model's."""
    named = ", ".join(map(str, tokens[-_NAMED:]))
    return named if len(tokens) <= _NAMED else f"{named} and {len(tokens) - _NAMED} more"


@dataclass(slots=True)
class _Reader:
    """Reads files and their keys; `unused` names the files and keys that are left out, and why."""

    directory: Path
    unused: list[str] = field(default_factory=list)

    def file(self, name: str, parsed: Callable[[BinaryIO], _T]) -> _T | None:
        """Return what `parsed` makes of a file; None for a missing file, and for a file that is noted as unused."""

        def read(path: Path) -> _T:
            with open_regular(path) as (file, size_bytes):
                if size_bytes > MAX_BYTES[name]:
                    raise ValueError(f"{size_bytes} bytes, more than {MAX_BYTES[name]}")
                return parsed(file)

        return self._used(name, read, self.directory / name)

    def key(self, fields: Mapping[str, Any], key: str, file: str, made: Callable[[Any], _T]) -> _T | None:
        """Return what `made` makes of a key's value; None for a missing key, and for a key that is noted as unused."""
        return None if fields.get(key) is None else self._used(f"{key} of {file}", made, fields[key])

    def _used(self, what: str, made: Callable[[_V], _T], value: _V) -> _T | None:
        """Return what `made` makes of the value; None for a missing file, and for a value that is noted as unused."""
        try:
            return made(value)
        except AdapterNotFound:
            pass
        except (TypeError, ValueError, RecursionError) as error:
            self.unused.append(f"{what} ({error.found if isinstance(error, InvalidAdapter) else error})")
        return None


def _text(file: BinaryIO) -> str:
    return file.read(MAX_BYTES[TEMPLATE_FILE]).decode("utf-8-sig")


def _object(file: BinaryIO) -> Mapping[str, Any]:
    return _kept(parse_json(file.read(MAX_BYTES[TOKENIZER_FILE])), dict)


def _head(file: BinaryIO) -> tuple[tuple[AddedToken, ...], str]:
    """Return the added tokens, and the JSON of the post-processor, which comes between these and the vocabulary.

    The beginning of the file is read first, and more of the file only if the added tokens do not end there.
    """
    data = b""
    for read_bytes in _HEADS_BYTES:
        data += file.read(read_bytes - len(data))
        text = data.decode("utf-8-sig", errors="ignore")  # may end within a character
        if (found := _ADDED.search(text)) is None:
            return (), ""
        try:
            tokens, post = _added(_entries(text, found.end())), _POST_PROCESSOR.search(text, found.end())
            if post is not None:
                made, _ = json.JSONDecoder().raw_decode(text, post.end())
                return tokens, _short(json.dumps(made), _POST_PROCESSOR_BYTES)
            if len(data) < read_bytes:  # the whole file was read
                return tokens, ""
        except (json.JSONDecodeError, RecursionError):
            if len(data) < read_bytes:  # with more to read, only the cut at the end may be at fault
                raise
    raise ValueError(f"added_tokens of more than {len(data)} bytes")


def _entries(text: str, place: int) -> Iterator[object]:
    """Yield the entries of a list in JSON one by one, so that a long list takes little memory.

    Raises:
        JSONDecodeError: the text ends before the list.
    """
    decode = json.JSONDecoder().raw_decode
    while (begin := _BEGIN.search(text, place)) is not None and begin.group() != "]":
        entry, place = decode(text, begin.start())
        yield entry
    if begin is None:
        raise json.JSONDecodeError("no end of added_tokens", text, len(text))


def _ids_by_text(ids: Mapping[str, Any], special: Collection[str | None]) -> tuple[AddedToken, ...]:
    """Return the tokens of `added_tokens.json`, which has ids by text, with the traits that Transformers assumes."""
    kinds = {text: "special" if text in special else "normalized" for text in ids}
    return _added({"id": token, "content": text, kinds[text]: True} for text, token in ids.items())


def _added(entries: Iterable[object]) -> tuple[AddedToken, ...]:
    tokens, text_bytes = [], 0
    for entry in (_kept(entry, dict) for entry in entries):
        (token,) = _ids([entry.get("id")])
        traits = frozenset(trait for trait in _TRAITS if entry.get(trait) is True)
        tokens.append(AddedToken(token, _token(entry), traits))
        text_bytes += len(tokens[-1].text.encode())
        if len(tokens) > _MOST_ADDED or text_bytes > _ADDED_BYTES:
            raise ValueError(f"added tokens over a limit: {_MOST_ADDED}, of {_ADDED_BYTES} bytes together")
    return tuple(tokens)


def _templates(value: object) -> dict[str, str]:
    """Return templates by name, from any of the forms that Transformers has had: a text, a list or an object."""
    if isinstance(value, str):
        value = {_DEFAULT: value}
    if isinstance(value, list):
        items = [_kept(item, dict) for item in value]
        value = {str(item.get("name")): item.get("template") for item in items}
    named = _kept(value, dict)
    return {kind: _short(_kept(named[kind], str), MAX_BYTES[TEMPLATE_FILE]) for kind in _KINDS if kind in named}


def _token(value: object) -> str:
    # Transformers writes a token with more properties than its text as an object.
    return _short(_kept(value.get("content") if isinstance(value, dict) else value, str), _LONGEST_TOKEN)


def _decoder(value: object) -> tuple[AddedToken, ...]:
    entries = _kept(value, dict).items()
    return _added({"id": int(key) if _ID.fullmatch(key) else key, **_kept(entry, dict)} for key, entry in entries)


def _short(text: str, longest: int) -> str:
    """Return the text, which must be UTF-8 of at most `longest` bytes."""
    # Halves of surrogate pairs, which JSON can name, are left out: the comparison then refuses the text.
    data = text.encode(errors="ignore")
    if len(data) > longest or data.decode() != text:
        raise ValueError(f"a text of {len(text)} characters; expected at most {longest} bytes of UTF-8")
    return text


def _ids(value: object) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [value]
    if len(found) > _MOST_END_IDS or not all(type(item) is int and 0 <= item < _VOCABULARY for item in found):
        raise ValueError(f"{value!r:.100}; expected the id of a token, or a list of ids")
    return tuple(found)


def _kept(value: object, kind: type[_T]) -> _T:
    """Return the value, which must be of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.100}; expected a value of kind {kind.__name__}")
    return value
