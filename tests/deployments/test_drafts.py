"""Beside a draft that speculates, adapters' tokens are PEFT's: the target's adapter decides what is accepted."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest

from testbed.bed import Bed
from testbed.decoding import Decoding
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.reference import Reference
from tests.deployments.quiet import assert_quiet, metric
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

pytestmark = pytest.mark.nightly

NAMES = [spec.name for spec in DEMO_ADAPTERS]
FEW = list(range(60, 64))  # tokens to choose from, so that some of what a draft says is right
TOKENS = 24


@pytest.mark.deployment(
    "speculative decoding", "tested", "a draft model, greedy: the base model and five adapters in two slots"
)
def test_tokens_beside_a_draft_are_those_of_peft(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    speculation = json.dumps({"method": "draft_model", "model": str(bed.base), "num_speculative_tokens": 2})
    reference = Reference(bed.base)
    prompt = reference.prompt_ids(PROMPT)
    expected = {
        name: Decoding(reference, None if name == "base" else bed.adapters / name).among(prompt, TOKENS, FEW)
        for name in ("base", *NAMES)
    }

    async def ids_of(client: httpx.AsyncClient, name: str, model: str) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "allowed_token_ids": FEW}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    with admin_server(bed, tmp_path, "--max-loras", "2", "--speculative-config", speculation) as server:
        served = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]

        async def run() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
                return list(
                    await asyncio.gather(*(ids_of(client, one, served if one == "base" else one) for one in expected))
                )

        assert dict(zip(expected, asyncio.run(run()), strict=True)) == expected
        assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > 0
        assert_quiet(server)
