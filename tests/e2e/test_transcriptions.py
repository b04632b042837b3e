"""Adapters of Whisper by /v1/audio/transcriptions: PEFT's answers, or a refusal that names vLLM's flag."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed import speech, wav_reader
from testbed.architectures import BY_NAME
from testbed.bed import Bed
from testbed.model_builder import MAX_TOKENS, build
from testbed.server import Server
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

FLAG = "--enable-tower-connector-lora"
ALL = (RESOLVER, MANAGER, KERNELS)
# What tokens are computed with, and what encoded audios are computed with; recipes have both.
OF_TOKENS = {
    "decoder": r".*\.decoder\..*(self_attn\.[qkv]_proj|fc2)",
    "cross-queries": r".*encoder_attn\.(q_proj|out_proj)",
}
OF_AUDIOS = {
    "encoder": r".*\.encoder\..*(self_attn\.[qkv]_proj|fc1)",
    "cross-values": r".*encoder_attn\.v_proj",
    "recipe": ["q_proj", "v_proj"],
}


@dataclasses.dataclass(frozen=True)
class Whisper:
    """The model, its adapters, and what PEFT hears with each ("" is the base model)."""

    base: Path
    adapters: Path
    texts: dict[str, str]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    from transformers import AutoTokenizer

    home = tmp_path_factory.mktemp("whisper")
    kinds = {name: {"target_modules": targets} for name, targets in (OF_TOKENS | OF_AUDIOS).items()}
    answers = build(BY_NAME["WhisperForConditionalGeneration"], home / "base", home / "adapters", kinds)
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    texts = {}
    for name, ids in answers.items():
        ends = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
        texts[name] = tokenizer.decode(ids[:ends], skip_special_tokens=True)
    assert len(set(texts.values())) == len(texts), "each adapter has an answer of its own"
    return Whisper(home / "base", home / "adapters", texts)


@contextmanager
def served(whisper: Whisper, bed: Bed, home: Path, *arguments: str, plugins: Sequence[str] = ALL) -> Iterator[Server]:
    shutil.copytree(whisper.adapters, home / "adapters")
    path = os.pathsep.join(filter(None, (str(wav_reader.FOLDER), os.environ.get("PYTHONPATH", ""))))
    with lora_server(
        dataclasses.replace(bed, base=whisper.base), home,
        *("--max-loras", "4", "--max-model-len", "64", "--max-num-batched-tokens", "2048", *arguments),
        plugins=plugins, program="testbed.wav_reader.serving:main", PYTHONPATH=path,
    ) as server:  # fmt: skip
        yield server


def ask(server: Server, name: str) -> httpx.Response:
    form = {"model": name, "language": "en", "temperature": "0", "max_completion_tokens": str(MAX_TOKENS)}
    files = {"file": ("a.wav", speech.wav(), "audio/wav")}
    return httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files, timeout=120)


def heard(server: Server, whisper: Whisper, names: Sequence[str]) -> dict[str, Any]:
    """What is answered to each, all at once."""
    with ThreadPoolExecutor(len(names)) as pool:
        answers = dict(zip(names, pool.map(lambda name: ask(server, name or str(whisper.base)), names), strict=True))
    return {name: one.json()["text"] if one.status_code == 200 else one.text for name, one in answers.items()}


def test_with_the_flag_each_hears_what_peft_hears(whisper: Whisper, bed: Bed, tmp_path: Path) -> None:
    names = list(whisper.texts)
    with served(whisper, bed, tmp_path, FLAG) as server:
        assert heard(server, whisper, names) == whisper.texts
        assert heard(server, whisper, names * 2) == whisper.texts  # warm: audios of all requests in one step


@pytest.mark.nightly
@pytest.mark.parametrize("plugins", [(RESOLVER,), (RESOLVER, MANAGER)], ids=["resolver", "manager"])
def test_vllms_own_kernels_hear_the_same(plugins: Any, whisper: Whisper, bed: Bed, tmp_path: Path) -> None:
    """One after the other: before 0.33 they compute the base model's rows with an adapter."""
    with served(whisper, bed, tmp_path, FLAG, plugins=plugins) as server:
        for name in whisper.texts:
            assert heard(server, whisper, [name]) == {name: whisper.texts[name]}


@pytest.mark.nightly
@pytest.mark.parametrize("plugins", [(RESOLVER,), (RESOLVER, MANAGER), ALL], ids=["resolver", "manager", "kernels"])
def test_without_the_flag_the_refusal_names_it(plugins: Any, whisper: Whisper, bed: Bed, tmp_path: Path) -> None:
    with served(whisper, bed, tmp_path, plugins=plugins) as server:
        for name in OF_AUDIOS:
            refusal = ask(server, name)
            assert refusal.status_code == 400
            text = refusal.json()["error"]["message"]
            assert "modules of the multimodal tower or connector" in text
            assert f"To fix: restart the server with {FLAG}" in text
        for name in ("", *OF_TOKENS):
            assert heard(server, whisper, [name]) == {name: whisper.texts[name]}
