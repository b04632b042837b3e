"""ART's service loads a step and prunes the step before, beside rollouts of it: URL BASE V1 V2 FOLDER PROMPT TOKENS.

The service of art/unsloth/service.py, whose vLLM is the server at URL: it is asked neither to start one nor to train.
Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

ROLLOUTS = 10


async def main(url: str, base: str, first: str, second: str, folder: str, prompt: list[int], tokens: int) -> None:
    from art.unsloth.service import UnslothService

    service = UnslothService("policy", base, {"rollout_weights_mode": "lora"}, folder)
    service._vllm_port = urlsplit(url).port

    async def rollout(step: int) -> Any:
        body = {"model": f"policy@{step}", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(
                f"{url}/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
            )
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text[:300]

    await service.register_lora_for_step(1, first)
    running = [asyncio.create_task(rollout(1)) for _ in range(ROLLOUTS)]
    await asyncio.sleep(1)
    await service.register_lora_for_step(2, second)
    began, error = time.perf_counter(), ""
    try:
        await service.prune_loaded_adapters(retain_steps={2})
    except httpx.HTTPError as raised:  # its own limit is 30 s
        error = repr(raised)
    prune_s, were_running = time.perf_counter() - began, sum(not one.done() for one in running)
    said = {"1": await asyncio.gather(*running), "2": [await rollout(2)], "1, pruned": [await rollout(1)]}
    print(json.dumps({"said": said, "unload_s": round(prune_s, 4), "error": error, "running": were_running}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:6], json.loads(sys.argv[6]), int(sys.argv[7])))
