"""Adapters of a multimodal model's tower and connector: served with vLLM's flag as PEFT computes them, else refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import Bed
from testbed.multimodal import MAX_TOKENS, PROMPT, TARGETS, Multimodal, build
from testbed.server import Server
from tests.e2e.admin import HEADERS
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server

pytestmark = pytest.mark.nightly

FLAG = "--enable-tower-connector-lora"
ONE_IMAGE = ("--limit-mm-per-prompt", '{"image": 1}', "--max-loras", "2", "--max-cpu-loras", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Multimodal:
    return build(tmp_path_factory.mktemp("multimodal"))


@dataclasses.dataclass(frozen=True)
class Asked:
    """A server of the model, and its adapters."""

    server: Server
    model: Multimodal
    root: Path

    def ask(self, name: str) -> httpx.Response:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": self.model.image_url}},
            {"type": "text", "text": PROMPT},
        ]
        body = {
            "model": name or str(self.model.base),
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "add_generation_prompt": False,
        }
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=120)

    def answer(self, name: str) -> list[int]:
        response = self.ask(name)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def with_flag(model: Multimodal, bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    home = tmp_path_factory.mktemp("with-flag")
    shutil.copytree(model.adapters, home / "adapters")
    plugins = (RESOLVER, MANAGER, KERNELS, ADMIN)
    bed = dataclasses.replace(bed, base=model.base)
    with lora_server(bed, home, FLAG, *ONE_IMAGE, plugins=plugins, LORA_PLUGINS_REFRESH_S="0") as server:
        yield Asked(server, model, home / "adapters")


def test_without_the_flag_the_refusal_names_it(model: Multimodal, bed: Bed, tmp_path: Path) -> None:
    """One resolver alone; the text model's adapter is served."""
    shutil.copytree(model.adapters, tmp_path / "adapters")
    with lora_server(dataclasses.replace(bed, base=model.base), tmp_path, *ONE_IMAGE, plugins=(RESOLVER,)) as server:
        asked = Asked(server, model, tmp_path / "adapters")
        assert asked.answer("") == model.answers[""]
        assert asked.answer("text") == model.answers["text"]
        for name, found in (("tower", "12 of 12"), ("connector", "1 of 1"), ("all", "")):
            refusal = asked.ask(name)
            assert refusal.status_code == 400
            text = refusal.json()["error"]["message"]
            assert f"{found} modules of the multimodal tower or connector" in text
            assert f"To fix: restart the server with {FLAG}" in text


def test_with_the_flag_answers_are_those_of_peft(with_flag: Asked) -> None:
    answers = with_flag.model.answers
    assert len({tuple(answer) for answer in answers.values()}) == len(answers), "each adapter has an answer of its own"
    assert {name: with_flag.answer(name) for name in ("", *TARGETS)} == {name: answers[name] for name in ("", *TARGETS)}


def test_a_swapped_tower_sees_an_image_that_was_seen_before(with_flag: Asked) -> None:
    """VLLM keeps what a tower made of an image under the adapter's name, which another version has too."""
    root, answers = with_flag.root, with_flag.model.answers
    shutil.copytree(root / "tower", root / "swapped")
    assert with_flag.answer("swapped") == answers["tower"]
    shutil.copytree(root / "tower-2", root / "fresh")
    (root / "swapped").rename(root / "old")
    (root / "fresh").rename(root / "swapped")
    swap = httpx.post(f"{with_flag.server.url}/v1/loras/swapped/refresh", headers=HEADERS, timeout=60)
    assert swap.status_code == 200, swap.text
    assert with_flag.answer("swapped") == answers["tower-2"]
    back = httpx.post(f"{with_flag.server.url}/v1/loras/swapped/rollback", headers=HEADERS, timeout=60)
    assert back.status_code == 200, back.text
    assert with_flag.answer("swapped") == answers["tower"]
