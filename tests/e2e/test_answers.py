"""Adapters that nobody registered answer as PEFT does, on every route, and vLLM's own ways of serving go on beside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS
from testbed.client import complete, complete_all
from testbed.models import DEMO_ADAPTERS, PROMPT, edit_config
from tests.e2e.conftest import World
from tests.e2e.digests import EVERY_WAY, of_files, seen_by

DEMO_NAMES = [spec.name for spec in DEMO_ADAPTERS]
CHAT = [{"role": "user", "content": "SELECT name FROM"}]


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_streamed_completion_equals_peft(world: World, name: str) -> None:
    answer = complete(world.client, name, PROMPT, MAX_TOKENS)
    assert answer.status == 200, answer.error
    assert list(answer.token_ids) == world.bed.answers[name]


@pytest.mark.parametrize("name", ["patterned", "regex", "renamed-base", "nameless-base", "alias-inside/poet", "sql@v3"])
def test_unusual_adapters_equal_peft(world: World, name: str) -> None:
    if name == "regex":
        edit_config(world.root / name, target_modules=r".*layers\.\d+\.self_attn\.[qkvo]_proj")
    if name == "nameless-base":
        edit_config(world.root / name, base_model_name_or_path=None)
    prompt = world.reference.prompt_ids(PROMPT)
    expected = world.reference.generate(world.root / name, prompt, MAX_TOKENS)
    answer = complete(world.client, name, PROMPT, MAX_TOKENS)
    assert answer.status == 200, answer.error
    assert list(answer.token_ids) == expected


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_chat_completion_equals_peft(world: World, name: str) -> None:
    expected = world.reference.generate(world.root / name, world.reference.chat_ids(CHAT), MAX_TOKENS)
    answer = world.client.chat.completions.create(
        model=name,
        messages=CHAT,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert list(answer.choices[0].token_ids) == expected


def test_responses_route_resolves_too(world: World) -> None:
    answer = world.client.responses.create(
        model="team/poet", input="SELECT name FROM", max_output_tokens=MAX_TOKENS, temperature=0
    )
    assert answer.model == "team/poet"
    assert answer.usage.output_tokens > 0


def test_unknown_name_on_the_tokenize_route_is_404(world: World) -> None:
    answer = httpx.post(
        f"{world.server.url}/tokenize", json={"model": "nobody/has-this", "prompt": PROMPT}, timeout=240
    )
    assert answer.status_code == 404


def test_mixed_batch_keeps_adapters_apart(world: World) -> None:
    # Without the base model: vLLM's CPU kernels before 0.33 compute its rows with the last slot's adapter when
    # they share a batch with adapters (docs/operate/known-limits.md).
    names = DEMO_NAMES * 4
    answers = asyncio.run(complete_all(world.server, names, PROMPT, MAX_TOKENS))
    for name, ids in zip(names, answers, strict=True):
        assert ids == world.bed.answers[name], name


def test_fifty_first_requests_load_once(world: World) -> None:
    answers = asyncio.run(complete_all(world.server, ["crowd"] * 50, PROMPT, MAX_TOKENS))
    assert answers == [world.bed.answers["sql"]] * 50
    log = world.server.log()
    assert log.count("Adapter 'crowd' from filesystem") == 1
    assert log.count("Resolved and loaded LoRA adapter 'crowd'") == 1


def test_models_show_lineage(world: World) -> None:
    assert complete(world.client, "team/poet", PROMPT, 1).status == 200
    cards = {card.id: card for card in world.client.models.list()}
    assert Path(cards["team/poet"].root).parent == world.store
    assert cards["team/poet"].parent == world.base
    assert cards[world.base].parent is None


def test_unloaded_adapter_is_resolved_again(world: World) -> None:
    assert complete(world.client, "stable", PROMPT, 1).status == 200
    unloaded = httpx.post(f"{world.server.url}/v1/unload_lora_adapter", json={"lora_name": "stable"}, timeout=240)
    assert unloaded.status_code == 200
    assert list(complete(world.client, "stable", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["stable"]


# --- the digest that answers say, by resolvers alone


@EVERY_WAY
def test_resolvers_alone_say_it_beside_vllms_fingerprint(world: World, route: str, stream: bool) -> None:
    header, fingerprints = seen_by(world.client, route, "sql", stream=stream)
    assert header == of_files(world.root / "sql")
    if route != "responses":
        assert str(fingerprints[-1]).startswith("vllm-")
        assert set(fingerprints[:-1]) <= {None, fingerprints[-1]}, "no stream has two fingerprints"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_say_no_digest(world: World, stream: bool) -> None:
    ask = world.client.completions.create
    assert seen_by(world.client, "completions", "sql", stream=False)[0], "it is served"
    refused = {}
    for model, prompt in (("nobody/has-this", PROMPT), ("truncated", PROMPT), ("sql", "word " * 1000)):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(model=model, prompt=prompt, max_tokens=4, stream=stream)
        assert HEADER not in caught.value.response.headers
        refused[model] = caught.value.status_code
    assert refused == {"nobody/has-this": 404, "truncated": 400, "sql": 400}


def test_a_static_module_answers_and_says_no_digest(world: World) -> None:
    assert list(complete(world.client, "static", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["sql"]
    assert seen_by(world.client, "completions", "static", stream=True)[0] is None
