"""What an adapter brings for chats, read from Transformers' files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from lora_plugins.adapter.chat import (
    ADDED_FILE,
    CHAT_FILES,
    GENERATION_FILE,
    MAX_BYTES,
    SPECIAL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOOLS_FILE,
    VOCABULARY_FILE,
    AddedToken,
    Chat,
    read_chat,
)
from testbed.models import write_tokenizer

PROCESSORS = ("chat_template.json", "processor_config.json")
LONG_TOKENS = [{"id": number, "content": f"{number:05}" + "x" * 900} for number in range(4700)]


def write(directory: Path, **files: Any) -> Path:
    names = {"template": TEMPLATE_FILE, "tokenizer": TOKENIZER_FILE, "generation": GENERATION_FILE}
    for kind, content in files.items():
        (directory / names[kind]).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_template_tokens_and_ends_are_read(tmp_path: Path) -> None:
    tokens = {"eos_token": "<|end|>", "bos_token": {"content": "<s>", "lstrip": False}, "pad_token": None}
    write(tmp_path, tokenizer={**tokens, "chat_template": "{{ messages }}"}, generation={"eos_token_id": [2, 7]})
    assert read_chat(tmp_path) == Chat(
        {"default": "{{ messages }}"}, {"bos_token": "<s>", "eos_token": "<|end|>"}, (2, 7)
    )


def test_the_template_file_comes_before_the_key(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer={"chat_template": named})
    assert read_chat(tmp_path).template_for(has_tools=False) == "old"
    assert read_chat(tmp_path).template_for(has_tools=True) == "tools"
    write(tmp_path, template="new")
    assert {read_chat(tmp_path).template_for(has_tools=has) for has in (True, False)} == {"new"}


def test_transformers_own_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """A tokenizer that Transformers saves, with the template as file and as key."""
    write_tokenizer(tmp_path / "base", 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for saves_file in (True, False):
        tokenizer.save_pretrained(tmp_path / str(saves_file), save_jinja_files=saves_file)
        chat = read_chat(tmp_path / str(saves_file))
        assert chat.templates["default"] == tokenizer.chat_template
        assert chat.special_tokens.items() <= tokenizer.special_tokens_map.items()
        assert chat.special_tokens["eos_token"] == tokenizer.eos_token


def test_added_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    """As Transformers 5 and 4 write them; the vocabulary behind them is not read."""
    entry = {"id": 7, "content": "<call>", "special": True, "lstrip": False}
    (tmp_path / VOCABULARY_FILE).write_text(
        '{"version": "1.0", "added_tokens": [' + json.dumps(entry) + '], "model": ?'
    )
    call = AddedToken(7, "<call>", frozenset({"special"}))
    assert read_chat(tmp_path).added_tokens == (call,)
    write(tmp_path, tokenizer={"added_tokens_decoder": {"8": {"content": "<end>"}}})
    assert read_chat(tmp_path).added_tokens == (call, AddedToken(8, "<end>"))


def test_a_long_list_of_added_tokens_is_read_whole(tmp_path: Path) -> None:
    """Longer than what is read at first, with characters of several bytes where that ends."""
    entries = [{"id": number, "content": f"<{number}>", "note": "\u00e9" * 100} for number in range(30_000)]
    text = json.dumps({"version": "1.0", "added_tokens": entries, "model": {}}, ensure_ascii=False)
    (tmp_path / VOCABULARY_FILE).write_text(text)
    assert len(text.encode()) > 4 << 20
    assert [token.text for token in read_chat(tmp_path).added_tokens] == [entry["content"] for entry in entries]
    (tmp_path / VOCABULARY_FILE).write_text(text[: text.index("<29999>")])
    assert "Unterminated string" in read_chat(tmp_path).unused[0]
    (tmp_path / VOCABULARY_FILE).write_text('{"added_tokens": [{"note": "' + "x" * (49 << 20))
    assert "added_tokens of more than 50331648 bytes" in read_chat(tmp_path).unused[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TEMPLATE_FILE, b"\xff\xfe"),
        (TOKENIZER_FILE, b"{"),
        (TOKENIZER_FILE, b"[]"),
        (TOKENIZER_FILE, b"[" * 100_000),
        (TOKENIZER_FILE, b'{"chat_template": 3}'),
        (TOKENIZER_FILE, b'{"chat_template": [{"name": "default"}]}'),
        (TOKENIZER_FILE, b'{"chat_template": "' + b"x" * (MAX_BYTES[TEMPLATE_FILE] + 1) + b'"}'),
        (TOKENIZER_FILE, b'{"chat_template": "' + "\u00e9".encode() * (MAX_BYTES[TEMPLATE_FILE] // 2 + 1) + b'"}'),
        (TOKENIZER_FILE, b'{"eos_token": "half a pair: \\ud800"}'),
        (TOKENIZER_FILE, b'{"eos_token": 7}'),
        (TOKENIZER_FILE, b'{"added_tokens_decoder": [1]}'),
        (TOKENIZER_FILE, b'{"added_tokens_decoder": {"x": {"content": "<a>"}}}'),
        (TOKENIZER_FILE, b'{"added_tokens_decoder": {"' + b"1" * 5000 + b'": {"content": "<a>"}}}'),
        (VOCABULARY_FILE, b'{"added_tokens": [{"id": 1, "content": "<a>"}'),
        (VOCABULARY_FILE, b'{"added_tokens": [{"id": [1, 2], "content": "<a>"}]}'),
        (VOCABULARY_FILE, b'{"added_tokens": [{"content": "<a>"}]}'),
        (VOCABULARY_FILE, b'{"added_tokens": [{"id": true, "content": "<a>"}]}'),
        (VOCABULARY_FILE, b'{"added_tokens": [{"id": 1}]}'),
        (VOCABULARY_FILE, b'{"added_tokens": ' + b"[" * 100_000),
        (VOCABULARY_FILE, b'{"added_tokens": [' + b'{"id":1,"content":""},' * 100_001 + b"{}]}"),
        (VOCABULARY_FILE, f'{{"added_tokens": {json.dumps(LONG_TOKENS)}}}'.encode()),
        (TOKENIZER_FILE, b'{"eos_token": "' + b"x" * 1001 + b'"}'),
        (GENERATION_FILE, b'{"eos_token_id": "7"}'),
        (GENERATION_FILE, b'{"eos_token_id": -1}'),
        (GENERATION_FILE, b'{"eos_token_id": true}'),
        (GENERATION_FILE, json.dumps({"eos_token_id": list(range(101))}).encode()),
        (GENERATION_FILE, b'{"eos_token_id": 1' + b"0" * 5000 + b"}"),
    ],
)
def test_what_transformers_never_writes_is_unused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    chat = read_chat(tmp_path)
    (unused,) = chat.unused
    assert name in unused
    assert unused in (chat.warning or "")
    assert replace(chat, unused=()) == Chat()


@pytest.mark.parametrize("odd", [-1, "1", 1.0, [[1]]])
def test_one_odd_value_leaves_the_others_as_they_are(odd: object, tmp_path: Path) -> None:
    """Values that Transformers loads, as TRL's PPO recipes write them."""
    said = f"eos_token_id of generation_config.json ({odd!r}; expected the id of a token, or a list of ids)"
    write(tmp_path, template="{{ messages }}", tokenizer={"eos_token": "<|end|>"}, generation={"eos_token_id": odd})
    assert read_chat(tmp_path) == Chat({"default": "{{ messages }}"}, {"eos_token": "<|end|>"}, unused=(said,))
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == odd


def test_templates_are_read_as_an_object_of_names_too(tmp_path: Path) -> None:
    named = {"default": "one", "tool_use": "tools", "rag": "more"}
    write(tmp_path, tokenizer={"chat_template": named, "eos_token": "</s>"})
    assert read_chat(tmp_path) == Chat({"default": "one", "tool_use": "tools"}, {"eos_token": "</s>"})
    write(tmp_path, tokenizer={"chat_template": False, "eos_token": "</s>"})
    (unused,) = read_chat(tmp_path).unused
    assert unused == "chat_template of tokenizer_config.json (False; expected a value of kind dict)"
    assert read_chat(tmp_path).special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize("has_decoder", [False, True])
def test_files_of_old_releases_are_read_as_transformers_reads_them(has_decoder: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = json.loads((tmp_path / TOKENIZER_FILE).read_text())
    if has_decoder:
        first = tokenizer.added_tokens_decoder[0]
        config["added_tokens_decoder"] = {"0": {"content": first.content, "special": True}}
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps({**config, "eos_token": "</s>"}))
    (tmp_path / SPECIAL_FILE).write_text(json.dumps({"eos_token": {"content": "<end>"}, "pad_token": "<s>"}))
    (tmp_path / ADDED_FILE).write_text(json.dumps({"<end>": len(tokenizer), "<call>": len(tokenizer) + 1}))
    judge, read = AutoTokenizer.from_pretrained(tmp_path), read_chat(tmp_path)
    assert dict(read.special_tokens) == judge.special_tokens_map
    added = {token: judge.added_tokens_decoder[token] for token in judge.added_tokens_decoder}
    assert {token.id: token.text for token in read.added_tokens} == {id_: str(it) for id_, it in added.items()}
    for token in read.added_tokens:
        assert token.traits == {trait for trait in ("special", "normalized") if getattr(added[token.id], trait)}
    assert read.unused == ()


def test_templates_of_files_are_chosen_as_transformers_chooses_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = {"default": "one", "tool_use": "tools", "rag": "more"}
    tokenizer.save_pretrained(tmp_path)
    assert {path.stem for path in (tmp_path / TOOLS_FILE).parent.iterdir()} == {"tool_use", "rag"}
    judge = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{}]):
        assert read_chat(tmp_path).template_for(has_tools=bool(tools)) == judge.get_chat_template(tools=tools)


def test_files_of_processors_are_named(tmp_path: Path) -> None:
    for name in PROCESSORS:
        (tmp_path / name).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert read_chat(tmp_path) == Chat(unused=tuple(f"{name} (of a processor)" for name in PROCESSORS))


@pytest.mark.parametrize("name", [name for name in CHAT_FILES if name not in PROCESSORS])
def test_files_over_the_limit_are_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    with (tmp_path / name).open("wb") as file:
        file.truncate(MAX_BYTES[name] + 1)
    assert read_chat(tmp_path) == Chat(unused=(f"{name} ({MAX_BYTES[name] + 1} bytes, more than {MAX_BYTES[name]})",))


def test_a_pipe_for_chats_is_unused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TOKENIZER_FILE)
    (unused,) = read_chat(tmp_path).unused
    assert unused.startswith(f"{TOKENIZER_FILE} (something that is not a regular file")
