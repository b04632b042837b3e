"""Adapters with trained tokens, and with vectors (DoRA, IA3, biases), answer as PEFT does, however they come.

Beside plain adapters and the base model, on one server and one engine for both.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

from lora_plugins.client import push
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import PROMPT, AdapterSpec, build_adapter, edit_config
from testbed.reference import Reference
from testbed.server import Server
from testbed.trained_tokens import with_tokens
from testbed.vectors import with_biases, with_factors, with_magnitudes
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S
from tests.e2e.test_offline import said_by

FEATURES = 256  # of the bed's base model
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Name → the plain adapter, and whose tokens are trained.
TRAINED = {"words": ("sql", (EMBEDDING,)), "heads": ("chat", (HEAD,)), "both": ("stable", (EMBEDDING, HEAD))}

# Name → the plain adapter that has vectors besides.
VECTORS = {"dora": "sql", "biases": "chat", "ia3": "sql"}
HEADS = ("head-1", "head-2")  # adapters with A and B for the head


@dataclass(frozen=True)
class Tokens:
    """Adapters with trained tokens or vectors, and what PEFT answers with them."""

    adapters: Path
    answers: dict[str | None, list[int]]
    prompt: list[int]


@pytest.fixture(scope="module")
def tokens(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    root, reference = tmp_path_factory.mktemp("tokens") / "adapters", Reference(bed.base)
    shutil.copytree(bed.adapters, root)
    for name in HEADS:  # each changes nearly every token
        edit_config(build_adapter(bed.base, root, AdapterSpec(name, 8, (HEAD,))), lora_alpha=400)
    prompt = reference.prompt_ids(PROMPT)
    answers = dict(bed.answers)
    for number, (name, (plain, modules)) in enumerate(TRAINED.items()):
        # Tokens that the prompt has, and that the answer would have.
        of_module = {EMBEDDING: [*prompt[3:1:-1], prompt[-1]], HEAD: sorted({*bed.answers[plain][:4]}, reverse=True)}
        with_tokens(root / plain, root / name, {it: of_module[it] for it in modules}, FEATURES, number)
    with_magnitudes(root / VECTORS["dora"], root / "dora", bed.base)
    with_biases(root / VECTORS["biases"], root / "biases")
    with_factors(root / VECTORS["ia3"], root / "ia3", bed.base)
    for name, plain in {**{name: plain for name, (plain, _) in TRAINED.items()}, **VECTORS}.items():
        answers[name] = reference.generate(root / name, prompt, MAX_TOKENS)
        assert answers[name] != answers[plain]
    return Tokens(root, answers, prompt)


@pytest.fixture(scope="module")
def server(bed: Bed, tokens: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("tokens-served")
    shutil.copytree(tokens.adapters, home / "adapters")
    with admin_server(bed, home, "--max-loras", "2", LORA_PLUGINS_ADMIN_KEY="key") as server:
        yield server


@pytest.mark.parametrize("kinds", [TRAINED, VECTORS], ids=["trained tokens", "vectors"])
def test_both_equal_peft_in_batches_with_others(
    bed: Bed, tokens: Tokens, server: Server, kinds: Mapping[str, object]
) -> None:
    """With two slots that are copied: slots change hands between adapters with rows or vectors and without."""
    names = [*kinds, "sql", "chat", "stable", str(bed.base)] * 4
    found = asyncio.run(complete_all(server, names, PROMPT, MAX_TOKENS))
    for name, ids in zip(names, found, strict=True):
        assert ids == tokens.answers[None if name == str(bed.base) else name], name


def test_pushed_ones_equal_peft_and_go_with_a_push(tokens: Tokens, server: Server) -> None:
    client = connect(server)
    for name in ("both", "stable", "words", "dora", "stable", "ia3", "biases"):
        folder = tokens.adapters / name
        config = json.loads((folder / "adapter_config.json").read_text())
        push("pushed", load_file(folder / "adapter_model.safetensors"), config, servers=[server.url], key="key")
        assert list(complete(client, "pushed", PROMPT, MAX_TOKENS).token_ids) == tokens.answers[name], name


def test_logprobs_of_prompts_are_those_of_their_rows(bed: Bed, tokens: Tokens, server: Server) -> None:
    _prompts_are_those_of_peft(bed, tokens, server, [*TRAINED, *HEADS, "stable", str(bed.base)] * 2)


def _prompts_are_those_of_peft(bed: Bed, tokens: Tokens, server: Server, names: list[str]) -> None:
    async def said() -> list[list[float]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
            bodies = [{"model": name, "prompt": tokens.prompt, "max_tokens": 1, "prompt_logprobs": 0} for name in names]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        every = [answer.json()["choices"][0]["prompt_logprobs"][1:] for answer in answers]
        return [[one[str(token)]["logprob"] for one, token in zip(of, tokens.prompt[1:], strict=True)] for of in every]

    for name, found in zip(names, asyncio.run(said()), strict=True):
        adapter = None if name == str(bed.base) else tokens.adapters / name
        assert found == pytest.approx(_logprobs_of_peft(bed.base, adapter, *tokens.prompt), abs=1e-3), name


@functools.cache
def _logprobs_of_peft(base: Path, adapter: Path | None, *prompt: int) -> list[float]:
    import torch

    with torch.no_grad():
        every = torch.log_softmax(Reference(base).load(adapter)(torch.tensor([prompt])).logits[0, :-1], -1)
    return [float(row[token]) for row, token in zip(every, prompt[1:], strict=True)]


def test_an_adapter_of_another_vocabulary_is_refused_by_name(bed: Bed, tokens: Tokens, server: Server) -> None:
    root = server.log_file.parent / "adapters"
    with_tokens(bed.adapters / "sql", root / "more-words", {EMBEDDING: [5, 512]}, FEATURES)
    answer = complete(connect(server), "more-words", PROMPT, 1)
    assert answer.status == 400
    assert "token 512 trained in 'model.embed_tokens'; expected ids below 512" in answer.error


def test_offline_paths_equal_peft(bed: Bed, tokens: Tokens, tmp_path: Path) -> None:
    names = [*TRAINED, *VECTORS, "sql"]
    asked: list[tuple[str, str | None]] = [(name, str(tokens.adapters / name)) for name in names]
    said = said_by("offline", bed, tmp_path, 0, [*asked, ("", None)])
    for (name, _), output in itertools.zip_longest([*asked, ("", None)], said["outputs"]):
        assert output[2] == tokens.answers[name or None], output


def test_vllms_kernels_serve_tokens_and_refuse_vectors_by_name(bed: Bed, tokens: Tokens, tmp_path: Path) -> None:
    shutil.copytree(tokens.adapters, tmp_path / "adapters")
    with admin_server(bed, tmp_path, "--max-loras", "4", LORA_PLUGINS_KERNELS="vllm") as server:
        names: list[Any] = [*TRAINED, "sql"] * 4  # not the base model, see docs/operate/known-limits.md
        found = asyncio.run(complete_all(server, names, PROMPT, MAX_TOKENS))
        assert found == [tokens.answers[name] for name in names]
        _prompts_are_those_of_peft(bed, tokens, server, [*TRAINED, *HEADS] * 2)
        answer = complete(connect(server), "dora", PROMPT, 1)
        assert answer.status == 400
        assert "(use_dora); expected A and B alone" in answer.error
        assert "lora_kernels" in answer.error
