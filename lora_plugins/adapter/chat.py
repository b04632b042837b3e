"""What an adapter brings for chats beside its weights: a template, special tokens, and the tokens that end an answer.

Trainers save them in Transformers' files: `chat_template.jinja`, `tokenizer_config.json`, `generation_config.json`. A
template is a program in Jinja: nothing here runs or parses the template; Transformers renders templates in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lora_plugins.adapter.files import open_regular
from lora_plugins.adapter.json_bounds import check_json
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, describing

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
# Far above real files: Gemma 3's `tokenizer_config.json` has 1.2 MB.
MAX_BYTES = {TEMPLATE_FILE: 256 << 10, TOKENIZER_FILE: 8 << 20, GENERATION_FILE: 1 << 20}
CHAT_FILES = tuple(MAX_BYTES)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Transformers' names of a template, and of the template for requests with tools.
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
_MOST_END_IDS, _LONGEST_TOKEN, _VOCABULARY = 100, 1000, 1 << 31
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chat:
    """What an adapter brings for chats; empty for an adapter that brings nothing.

    Attributes:
        template: the chat template. tool_template: another template, for requests with tools.
        special_tokens: texts of special tokens by their names in templates (`bos_token`).
        end_ids: ids of the tokens that end an answer, beside `eos_token` of `special_tokens`.
    """

    template: str | None = None
    tool_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()

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
    return Chat(templates.get(_DEFAULT), templates.get(_FOR_TOOLS), special_tokens, end_ids)


def check_chat_size(name: str, size_bytes: int) -> None:
    """Refuse a file that is longer than the limit.

    Raises:
        InvalidAdapter: the file is longer.
    """
    if size_bytes > MAX_BYTES[name]:
        with describing(file=name):
            raise _broken(f"{size_bytes} bytes", f"at most {MAX_BYTES[name]}")


def _read(directory: Path, name: str, parsed: Callable[[bytes], _T]) -> _T | None:
    try:
        with open_regular(directory / name) as (file, size_bytes), describing(file=name):
            check_chat_size(name, size_bytes)
            return parsed(file.read(MAX_BYTES[name]))
    except AdapterNotFound:
        return None


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _broken(f"text that stops being UTF-8 at byte {error.start}", "UTF-8") from None


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        check_json(data)
        found = json.loads(_text(data))
    except (ValueError, RecursionError) as error:
        raise _broken(f"no JSON ({str(error)[:200]})", "JSON") from None
    return _kept(found, dict, "the file")


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
    if len(text) > longest:
        raise _broken(f"a text of {len(text)} characters", f"at most {longest}")
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
