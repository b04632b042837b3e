"""vLLM's stores of responses, with ids that two principals have chosen alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lora_plugins.api.access.policy import Principal
from lora_plugins.api.access.principals import principal_of_request
from lora_plugins.vllm_patches.api_server.access import patch_stores


@pytest.mark.parametrize("store", ["response_store", "msg_store", "event_store", "background_tasks"])
def test_equal_ids_of_two_principals_are_two_entries(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    def made(self: Any) -> None:
        setattr(self, store, {})

    monkeypatch.setattr(OpenAIServingResponses, "__init__", made)
    patch_stores()
    patch_stores()
    kept = getattr(OpenAIServingResponses(), store)  # type: ignore[call-arg]

    async def request(label: str, value: str) -> None:
        principal_of_request.set(Principal(label))
        assert kept.get("resp_1") is None
        kept["resp_1"] = value
        await asyncio.sleep(0)
        # A task of the request, as vLLM's background responses, is of the same principal.
        assert await asyncio.create_task(read()) == value
        asyncio.current_task().add_done_callback(lambda _: kept.pop("resp_1"))  # type: ignore[union-attr]

    async def read() -> str:
        assert "resp_1" in kept
        return str(kept["resp_1"])

    async def run() -> None:
        await asyncio.gather(request("a", "of a"), request("b", "of b"))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not any(kept._of.values()), "each was taken out by its own request"
    assert len(kept) == 0
