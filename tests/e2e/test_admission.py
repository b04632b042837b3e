"""Admission in the scheduler of a real server: one slot, room for few adapters, and a KV cache that is soon full.

Each test stands for something that went wrong while requests were held in the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import vllm_server
from tests.e2e.conftest import OneSlot
from tests.e2e.servers import ADMIN, BLOCKS, ENVIRONMENT, KERNELS, MANAGER, RESOLVER
from tests.e2e.standing_still import LONGEST_S, seen
from tests.e2e.test_in_flight import tokens_of

NAMES = [spec.name for spec in DEMO_ADAPTERS]


@pytest.fixture(autouse=True)
def engine_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, the engine runs afterwards, holds nothing, and never crashed."""
    yield
    if "one_slot" not in request.fixturenames:
        return
    one: OneSlot = request.getfixturevalue("one_slot")
    assert complete(connect(one.server), "chat", PROMPT, MAX_TOKENS).token_ids == tuple(one.bed.answers["chat"])
    views = httpx.get(f"{one.server.url}/v1/loras", timeout=LONGEST_S).json()["loras"]
    assert [view for view in views if view["requests_held"] or view["requests_in_flight"]] == []
    log = one.server.log()
    for sign in ("EngineDeadError", "EngineCore encountered a fatal error", "Task exception was never retrieved"):
        assert sign not in log


async def held_of(client: httpx.AsyncClient, name: str) -> int:
    view = await client.get(f"/v1/loras/{name}")
    return int(view.json()["requests_held"]) if view.status_code == 200 else 0


@pytest.mark.deployment("--max-loras 1", "tested", "five adapters through one slot")
def test_one_slot_serves_every_adapter_as_peft(one_slot: OneSlot) -> None:
    async def run() -> list[list[int]]:
        async with one_slot.client() as client:
            return list(await asyncio.gather(*(tokens_of(client, name) for name in NAMES * 6)))

    assert asyncio.run(run()) == [one_slot.bed.answers[name] for name in NAMES * 6]


def test_failing_streams_hold_no_slot(one_slot: OneSlot) -> None:
    """Prompts that are too long pass vLLM's check of the model, and fail after it."""

    async def run() -> None:
        async with one_slot.client() as client:
            await tokens_of(client, "chat", 1)
            failed, done = 0, asyncio.Event()

            async def fail() -> None:
                nonlocal failed
                while not done.is_set():
                    body = {"model": "sql", "prompt": "x " * 4000, "max_tokens": 1, "stream": True}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 400, answer.text
                    failed += 1
                    await asyncio.sleep(0.05)

            async def all_have_failed() -> bool:
                return failed >= len(failing)

            failing = [asyncio.create_task(fail()) for _ in range(4)]
            await seen(all_have_failed)
            assert await tokens_of(client, "chat") == one_slot.bed.answers["chat"]  # they go on until it is answered
            done.set()
            await asyncio.gather(*failing)
            assert await held_of(client, "sql") == 0

    asyncio.run(run())


@pytest.mark.deployment(
    "our plugins without --enable-lora", "tested", "unknown names are 404, adapters 400 with a remedy"
)
def test_without_lora_names_are_unknown_and_adapters_refused(bed: Bed, tmp_path: Path) -> None:
    """Servers that share VLLM_PLUGINS with others, and do without --enable-lora."""
    with vllm_server(
        bed.base,
        tmp_path / "server.log",
        arguments=BLOCKS,
        env={
            "VLLM_PLUGINS": f"{RESOLVER},lora_s3_resolver,lora_hf_hub_resolver,{MANAGER},{KERNELS},{ADMIN}",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(bed.adapters),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"),
            **ENVIRONMENT,
        },
        is_forking=True,
    ) as server:
        client = connect(server)
        unknown, adapter, base = (
            complete(client, name, PROMPT, MAX_TOKENS) for name in ("nobody", "sql", str(bed.base))
        )
        assert (base.status, list(base.token_ids)) == (200, bed.answers[None])
        assert unknown.status == 404, unknown
        assert adapter.status == 400, adapter
        assert "[L003]" in adapter.error
        assert "--enable-lora" in adapter.error.partition("To fix:")[2]
        listed = httpx.get(f"{server.url}/v1/loras", timeout=LONGEST_S)
        assert (listed.status_code, listed.json()["loras"]) == (200, [])
        assert httpx.get(f"{server.url}/metrics", timeout=LONGEST_S).status_code == 200
        assert "AttributeError" not in server.log()
