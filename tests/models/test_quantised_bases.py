"""Adapters on base models of four bits: answers are those of PEFT over the values that the four bits stand for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from testbed.bed import Bed
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter, build_base
from testbed.quantised import quantise
from testbed.real_model import NoRealModel, real_model
from testbed.vectors import with_magnitudes
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server

PLUGINS = (RESOLVER, MANAGER, KERNELS)
PROMPT = list(range(20, 60))
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
QUESTION = [{"role": "user", "content": "What is the sea?"}]
# Half precision is all that vLLM's four-bit layers take.
NEAR, FAR = 0.05, 0.4


def logprobs_of(model: torch.nn.Module, prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens after the first."""
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits.log_softmax(-1)[0]
    return [float(logprobs[place - 1, token]) for place, token in enumerate(prompt) if place]


def distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def are_served(client: httpx.Client, prompt: list[int], expected: dict[str, tuple[list[float], list[float]]]) -> None:
    """Each model's log-probabilities are near the first of its pair, and far from the second."""
    for model, (right, wrong) in expected.items():
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["prompt_logprobs"]
        served = [said[place][str(token)]["logprob"] for place, token in enumerate(prompt) if place]
        assert distance(served, right) < NEAR
        assert distance(served, wrong) > FAR


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_adapters_on_four_bits_answer_as_peft_on_floats(scheme: str, tmp_path: Path) -> None:
    base = build_base(tmp_path / "base")
    adapter = build_adapter(base, tmp_path / "adapters", AdapterSpec("sql", 8, ATTENTION + MLP))
    made, plain = quantise(base, tmp_path, scheme)
    dora = with_magnitudes(adapter, adapter.with_name("dora"), plain)

    def of(with_adapter: Path | None) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        return logprobs_of(PeftModel.from_pretrained(model, with_adapter) if with_adapter else model, PROMPT)

    of_base, of_adapter, of_dora = of(None), of(adapter), of(dora)
    assert min(distance(of_base, of_adapter), distance(of_adapter, of_dora)) > FAR
    with (
        lora_server(Bed(made, tmp_path, {}), tmp_path, "--dtype", "half", plugins=PLUGINS) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        are_served(
            client, PROMPT, {name: (of_base, of_adapter), "sql": (of_adapter, of_base), "dora": (of_dora, of_adapter)}
        )


@pytest.mark.nightly
def test_a_real_model_of_four_bits_serves_trained_adapters(tmp_path: Path) -> None:
    """Trained on the float model, and served over its four bits: PEFT's over the values that these stand for."""
    try:
        base = real_model()
    except NoRealModel as error:
        pytest.skip(str(error))
    made, plain = quantise(base, tmp_path, "awq")
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(chat + "Arr, the sea be a mighty wave that crashes against the ship, matey!")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    of_base = logprobs_of(model, prompt)
    of_adapter = logprobs_of(PeftModel.from_pretrained(model, EXAMPLES / "pirate"), prompt)
    assert distance(of_base, of_adapter) > FAR
    (tmp_path / "adapters").symlink_to(EXAMPLES)
    with (
        lora_server(Bed(made, tmp_path, {}), tmp_path, "--dtype", "half", plugins=PLUGINS) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        are_served(client, prompt, {name: (of_base, of_adapter), "pirate": (of_adapter, of_base)})
