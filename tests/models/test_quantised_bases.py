"""Adapters on base models of four bits: answers are those of PEFT over the values that the four bits stand for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from testbed.bed import Bed
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter, build_base
from testbed.quantised import quantise
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

PLUGINS = (RESOLVER, MANAGER, KERNELS)
PROMPT = list(range(20, 60))
# Half precision is all that vLLM's four-bit layers take.
NEAR, FAR = 0.05, 0.4


def logprobs_of(model: torch.nn.Module) -> list[float]:
    """Log-probabilities of the prompt's tokens after the first."""
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits.log_softmax(-1)[0]
    return [float(logprobs[place - 1, token]) for place, token in enumerate(PROMPT) if place]


def distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_adapters_on_four_bits_answer_as_peft_on_floats(scheme: str, tmp_path: Path) -> None:
    base = build_base(tmp_path / "base")
    adapter = build_adapter(base, tmp_path / "adapters", AdapterSpec("sql", 8, ATTENTION + MLP))
    made, plain = quantise(base, tmp_path, scheme)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    of_base = logprobs_of(model)
    of_adapter = logprobs_of(PeftModel.from_pretrained(model, adapter))
    assert distance(of_base, of_adapter) > FAR
    with (
        lora_server(Bed(made, tmp_path, {}), tmp_path, "--dtype", "half", plugins=PLUGINS) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        for model_name, right, wrong in ((name, of_base, of_adapter), ("sql", of_adapter, of_base)):
            body = {"model": model_name, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["prompt_logprobs"]
            served = [said[place][str(token)]["logprob"] for place, token in enumerate(PROMPT) if place]
            assert distance(served, right) < NEAR
            assert distance(served, wrong) > FAR
