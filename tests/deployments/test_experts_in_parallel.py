"""A mixture of experts with two engines: an idle one computes dummy batches with ids 1, 2, … for the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from testbed import model_builder
from testbed.architectures import BY_NAME
from testbed.bed import Bed
from testbed.models import _byte_tokenizer
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

pytestmark = pytest.mark.nightly

KINDS = ("attention", "rslora", "patterns", "router")


@pytest.mark.deployment(
    "mixture of experts, data parallel", "tested", "two engines, adapters of attention and router; one idle in turn"
)
def test_an_idle_engines_dummies_remove_nothing(tmp_path: Path, bed: Bed) -> None:
    architecture = BY_NAME["OlmoeForCausalLM"]
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    answers = model_builder.build(architecture, base, adapters)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer(512), bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(base)
    for kind in set(architecture.kinds()) - set(KINDS):
        shutil.rmtree(adapters / kind, ignore_errors=True)
    here = Bed(base, adapters, {})
    with admin_server(
        here, tmp_path, "--max-loras", "2", "--data-parallel-size", "2", "--api-server-count", "1",
        "--max-model-len", "64", "--lora-target-modules", *architecture.only,
    ) as server:  # fmt: skip

        def answer(model: str) -> list[int]:
            body = {
                "model": model, "prompt": model_builder.PROMPT, "max_tokens": model_builder.MAX_TOKENS,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONGEST_S)
            assert said.status_code == 200, said.text
            return list(said.json()["choices"][0]["token_ids"])

        expected = {kind: answers[kind] for kind in KINDS}
        assert answer("attention") == answers["attention"]
        pinned = httpx.post(f"{server.url}/v1/loras/attention/pin", timeout=LONGEST_S)
        assert pinned.status_code == 200, pinned.text
        for _ in range(3):  # one at a time, so the other engine has nothing but dummies
            assert {kind: answer(kind) for kind in KINDS} == expected
            assert answer(str(base)) == answers[""]
            view = httpx.get(f"{server.url}/v1/loras/attention", timeout=LONGEST_S).json()
            assert (view["pinned"], set(view["tiers"])) == (True, {"store", "host", "slot"}), "in both engines"
        log = server.log()
        assert "/not/a/real/path" not in log
        assert "Traceback" not in log
