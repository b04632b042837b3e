"""Requests that run, or are held, while what they asked for is changed; and what a restart brings back.

One server with one slot, whose engine is made to stand still where the order of events matters.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS
from testbed.models import PROMPT
from tests.e2e.conftest import OneSlot
from tests.e2e.standing_still import LONGEST_S, TOKENS, in_state, in_the_midst_of, is_held, seen

_ANSWERED_S = 30.0  # a call that waits for the resume is never answered


async def tokens_of(client: httpx.AsyncClient, name: str, tokens: int = MAX_TOKENS) -> list[int]:
    answer = await client.post("/v1/completions", json=body(name, tokens))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def body(name: str, tokens: int, **more: Any) -> dict[str, Any]:
    fixed = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": name, "max_tokens": tokens, **fixed, **more}


async def view_of(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/loras/{name}")
    return dict(answer.json()) if answer.status_code == 200 else {}


def standing_still(client: httpx.AsyncClient, name: str) -> AbstractAsyncContextManager[asyncio.Task[list[int]]]:
    """Inside, a long request for this adapter is in flight in the engine, which stands still: it has the slot."""

    async def begin() -> asyncio.Task[list[int]]:
        running = asyncio.create_task(tokens_of(client, name, TOKENS))

        async def is_in_the_engine() -> bool:
            return running.done() or await in_state(client, name, "serving", 1)

        await seen(is_in_the_engine)
        return running

    return in_the_midst_of(client, name, begin)


@pytest.mark.parametrize(
    ("stream", "block", "status", "code"),
    [(False, True, 404, "L002"), (True, False, 503, "L001")],
    ids=["whole, blocked", "stream, at the end of its time"],
)
def test_an_operators_unload_refuses_held_requests(
    one_slot: OneSlot, stream: bool, block: bool, status: int, code: str
) -> None:
    runs, waits = f"runs-{stream}-{block}", f"waits-{stream}-{block}"
    for name, original in ((runs, "sql"), (waits, "chat")):
        one_slot.publish(name, original, 1)

    async def unload() -> tuple[httpx.Response, httpx.Response, list[int]]:
        async with one_slot.client() as client:
            assert await tokens_of(client, waits) == one_slot.bed.answers["chat"]
            assert await tokens_of(client, runs) == one_slot.bed.answers["sql"]
            before = (await view_of(client, waits))["last_used_at"]
            async with standing_still(client, runs) as running:
                waiting = asyncio.create_task(client.post("/v1/completions", json=body(waits, 1, stream=stream)))

                await seen(lambda: is_held(client, waits))
                view = await view_of(client, waits)
                assert (view["requests_in_flight"], view["last_used_at"] > before) == (0, True)
                params = {"timeout_s": LONGEST_S if block else 0, "block": block}
                unloaded = await client.delete(f"/v1/loras/{waits}", params=params)
                refused = await waiting
                assert not running.done()
            return unloaded, refused, await running

    unloaded, refused, ran = asyncio.run(unload())
    assert (unloaded.status_code, unloaded.json()["status"]) == (200, "success")
    assert (refused.status_code, f"[{code}]" in refused.text) == (status, True), refused.text
    assert ("retry-after" in refused.headers) == (status == 503)
    assert len(ran) == TOKENS, "what runs is another adapter's"


@pytest.mark.parametrize("where", ["running", "kept", "arriving"])
def test_vllms_unload_ends_nothing_that_was_accepted(one_slot: OneSlot, where: str) -> None:
    """As trainers call it in each of their syncs: it waits for no rollout, and every rollout ends whole."""
    name = f"version-{where}"
    one_slot.publish(name, "sql", 1)

    async def train() -> tuple[httpx.Response, bool, list[int]]:
        async with one_slot.client() as client:
            assert await tokens_of(client, name) == one_slot.bed.answers["sql"]
            rollout = None if where == "arriving" else asyncio.create_task(tokens_of(client, name, 2 * TOKENS))
            if rollout is not None:
                await seen(lambda: in_state(client, name, "serving", 1))
            if where != "running":
                assert (await client.post("/pause", params={"mode": "keep"})).status_code == 200
            if rollout is None:
                rollout = asyncio.create_task(tokens_of(client, name, 2 * TOKENS))
                await seen(lambda: is_held(client, name))
            unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            has_waited = rollout.done()
            if where != "running":
                assert (await client.post("/resume")).status_code == 200
            tokens = await rollout
            await seen(lambda: is_gone(client, name))
            return unloaded, has_waited, tokens

    unloaded, has_waited, tokens = asyncio.run(train())
    assert (unloaded.status_code, has_waited, len(tokens)) == (200, False, 2 * TOKENS)
    assert tokens[:MAX_TOKENS] == one_slot.bed.answers["sql"]


async def is_gone(client: httpx.AsyncClient, name: str) -> bool:
    return (await client.get(f"/v1/loras/{name}")).status_code == 404


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_lets_a_trainer_replace_and_unload(one_slot: OneSlot, tmp_path: Path, mode: str) -> None:
    """vLLM's default pauses let nothing begin: who waits for requests then waits for the trainer that waits for him."""
    policy, other = f"policy-{mode}", f"other-{mode}"
    one_slot.publish(policy, "sql", 1)
    one_slot.publish(other, "chat", 1)
    trained = tmp_path / "trained"
    shutil.copytree(one_slot.bed.adapters / "chat", trained)
    load = {"lora_name": policy, "lora_path": str(trained), "load_inplace": True}

    async def train() -> tuple[list[int], httpx.Response]:
        async with one_slot.client() as client:
            assert await tokens_of(client, policy) == one_slot.bed.answers["sql"]
            assert await tokens_of(client, other) == one_slot.bed.answers["chat"]
            paused = await client.post("/pause", params={"mode": mode})
            assert paused.status_code == 200, paused.text
            try:
                rollout = asyncio.create_task(tokens_of(client, policy))
                late = asyncio.create_task(client.post("/v1/completions", json=body(other, 1)))
                await seen(lambda: is_held(client, policy))
                await seen(lambda: is_held(client, other))
                async with asyncio.timeout(_ANSWERED_S):
                    loaded = await client.post("/v1/load_lora_adapter", json=load)
                    unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": other})
                assert (loaded.status_code, unloaded.status_code) == (200, 200), (loaded.text, unloaded.text)
            finally:
                assert (await client.post("/resume")).status_code == 200
            assert await tokens_of(client, policy) == one_slot.bed.answers["chat"]
            return await rollout, await late

    rollout, late = asyncio.run(train())
    assert rollout == one_slot.bed.answers["sql"], "asked for before the policy was replaced"
    assert late.status_code == 200, late.text
