"""A mixture of experts with two engines: an idle one computes dummy batches with ids 1, 2, … for the other."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from testbed import model_builder
from testbed.architectures import BY_NAME
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete_all
from testbed.models import DEMO_ADAPTERS, PROMPT
from tests.e2e.servers import admin_server, lora_server
from tests.e2e.standing_still import LONGEST_S

NAMES = [spec.name for spec in DEMO_ADAPTERS]
EXPERTS = BY_NAME["OlmoeForCausalLM"]

pytestmark = pytest.mark.nightly


@pytest.mark.deployment(
    "mixture of experts, data parallel",
    "vllm",
    "its CPU build cannot exchange tokens: `NotImplementedError` of `all_gatherv`",
)
def test_vllms_cpu_build_cannot_exchange_tokens_of_experts(bed: Bed, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model_builder.build(EXPERTS, base, tmp_path / "made")
    AutoTokenizer.from_pretrained(bed.base).save_pretrained(base)  # the prompt is given as ids
    with lora_server(
        Bed(base, tmp_path, {}), tmp_path, "--max-model-len", "64", "--data-parallel-size", "2",
        "--api-server-count", "1", "--lora-target-modules", *EXPERTS.only, plugins=(),
    ) as server:  # fmt: skip
        body = {"model": str(base), "prompt": model_builder.PROMPT, "max_tokens": 4}
        asked = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONGEST_S)
        assert asked.status_code == 500
        assert "in all_gatherv" in server.log()
        assert "NotImplementedError" in server.log()


@pytest.mark.deployment(
    "mixture of experts, data parallel",
    "tested",
    "vLLM's dummy batches on a dense model: pins, host cache and answers stay",
)
def test_dummy_batches_between_requests_remove_nothing(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    with admin_server(bed, tmp_path, "--max-loras", "2") as server:

        def post(path: str, **body: Any) -> Any:
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=LONGEST_S)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for round_number in range(3):
            answers = asyncio.run(complete_all(server, NAMES * 4, PROMPT, MAX_TOKENS, at_once=8))
            assert answers == [bed.answers[name] for name in NAMES * 4]
            if round_number == 0:
                post("/v1/loras/sql/pin")
            for _ in range(10):
                post("/collective_rpc", method="execute_dummy_batch")
            view = httpx.get(f"{server.url}/v1/loras/sql", timeout=LONGEST_S).json()
            assert (view["pinned"], set(view["tiers"])) == (True, {"store", "host", "slot"})
            (worker,) = post("/collective_rpc", method="get_lora_metrics")["results"]
            assert worker["adapters"]["registered"] == len(NAMES), "cold ones are in host memory still"
