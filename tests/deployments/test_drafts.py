"""Beside a draft that speculates, adapters' tokens are PEFT's: the target's adapter decides what is accepted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from testbed import drafts
from testbed.bed import Bed
from testbed.decoding import Decoding
from testbed.models import ATTENTION, DEMO_ADAPTERS, PROMPT, AdapterSpec, build_adapter
from testbed.reference import Reference
from testbed.trained_tokens import with_tokens
from tests.deployments.quiet import assert_quiet, metric
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

pytestmark = pytest.mark.nightly

DEMO = tuple(spec.name for spec in DEMO_ADAPTERS)
ENDS = AdapterSpec("ends", 8, (*ATTENTION, "embed_tokens", "lm_head"))  # modules that EAGLE's first form has too
TRAINED = "trained"  # with trained tokens
FEW = list(range(60, 64))  # tokens to choose from, so that some of what a draft says is right
TOKENS = 24

Made = tuple[Path, dict[str, str]]  # the base model, and vLLM's --speculative-config
Making = Callable[[Path, Path], Made]


def draft_model(base: Path, home: Path) -> Made:
    return base, {"method": "draft_model", "model": str(drafts.model(base, home, FEW))}


def eagle(base: Path, home: Path) -> Made:
    return base, {"method": "eagle", "model": str(drafts.eagle(base, home, FEW))}


def eagle3(base: Path, home: Path) -> Made:
    return base, {"method": "eagle3", "model": str(drafts.eagle3(base, home, FEW))}


def multi_token(base: Path, home: Path) -> Made:
    return drafts.multi_token(base, home, FEW), {"method": "mtp"}


def cell(made_by: Making, what: str, adapters: tuple[str, ...]) -> object:
    note = f"{what}, greedy: the base model and {len(adapters)} adapters in two slots"
    marks = pytest.mark.deployment("speculative decoding", "tested", note)
    return pytest.param(made_by, adapters, marks=marks, id=made_by.__name__)


@pytest.mark.parametrize(
    ("made_by", "adapters"),
    [
        cell(draft_model, "a draft model", (*DEMO, ENDS.name)),
        cell(eagle, "a draft of EAGLE", (*DEMO, ENDS.name)),
        cell(eagle3, "a draft of EAGLE-3", (*DEMO, ENDS.name)),
        cell(multi_token, "multi-token prediction (MTP), of MiMo", DEMO),  # of whose embeddings vLLM adapts none
    ],
)
def test_tokens_beside_a_draft_are_those_of_peft(
    bed: Bed, tmp_path: Path, made_by: Making, adapters: tuple[str, ...]
) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    build_adapter(bed.base, tmp_path / "adapters", ENDS)
    # EAGLE and multi-token prediction share the embedding, which has rows of the adapter's own.
    tokens = {"model.embed_tokens": FEW[:3], "lm_head": FEW[1:]}
    with_tokens(bed.adapters / "stable", tmp_path / "adapters" / TRAINED, tokens, features=256)
    base, draft = made_by(bed.base, tmp_path / "draft")
    speculation = json.dumps({**draft, "num_speculative_tokens": 2})
    reference = Reference(base)
    prompt = reference.prompt_ids(PROMPT)
    expected = {
        name: Decoding(reference, None if name == "base" else tmp_path / "adapters" / name).among(prompt, TOKENS, FEW)
        for name in ("base", TRAINED, *adapters)
    }
    assert len(set(map(tuple, expected.values()))) == len(expected)  # a mix-up would be seen

    async def ids_of(client: httpx.AsyncClient, name: str, model: str) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "allowed_token_ids": FEW}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    with admin_server(
        dataclasses.replace(bed, base=base), tmp_path, "--max-loras", "2", "--speculative-config", speculation
    ) as server:
        served = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]

        async def run() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
                return list(
                    await asyncio.gather(*(ids_of(client, one, served if one == "base" else one) for one in expected))
                )

        assert dict(zip(expected, asyncio.run(run()), strict=True)) == expected
        assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > TOKENS  # more than one answer's
        assert_quiet(server)
