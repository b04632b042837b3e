"""What digest an adapter must have, and what a client sees of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from lora_plugins.lifecycle.response import HEADER
from lora_plugins.store.manifest import StoredFile, digest_of
from testbed.bed import MAX_TOKENS
from testbed.models import PROMPT

GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
CHAT = [{"role": "user", "content": PROMPT}]

Seen = tuple[str | None, list[str | None]]


def seen_by(client: openai.OpenAI, route: str, model: str, *, stream: bool) -> Seen:
    """What a client sees of one answer: the header, and each chunk's fingerprint; a response of that route has none."""
    with_raw: dict[str, Callable[..., Any]] = {
        "completions": lambda **more: client.completions.with_raw_response.create(prompt=PROMPT, **GREEDY, **more),
        "chat": lambda **more: client.chat.completions.with_raw_response.create(messages=CHAT, **GREEDY, **more),
        "responses": lambda **more: client.responses.with_raw_response.create(
            input=PROMPT, max_output_tokens=MAX_TOKENS, temperature=0, **more
        ),
    }
    raw = with_raw[route](model=model, stream=stream)
    parts = list(raw.parse()) if stream else [raw.parse()]
    assert parts
    has_fingerprint = route != "responses"
    return raw.headers.get(HEADER), [part.system_fingerprint for part in parts] if has_fingerprint else []


EVERY_WAY = pytest.mark.parametrize(
    ("route", "stream"), [(route, stream) for route in ("completions", "chat", "responses") for stream in (False, True)]
)


def of_files(directory: Path) -> str:
    """Of an adapter as its source has it."""
    files = [file for file in directory.iterdir() if file.name.startswith("adapter_")]
    sums = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return digest_of(StoredFile(file.name, file.stat().st_size, sums[file]) for file in files)
