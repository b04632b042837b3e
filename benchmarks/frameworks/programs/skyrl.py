"""SkyRL's client hands over two versions at one path, the second beside rollouts: URL BASE V1 V2 FOLDER PROMPT TOKENS.

As its workers do (workers/fsdp/fsdp_worker.py), and its asynchronous trainer, between a pause with `keep` and a resume.
Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
import typing
from typing import Any

import typing_extensions

ROLLOUTS = 4


async def main(url: str, base: str, first: str, second: str, folder: str, prompt: list[int], tokens: int) -> None:
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment] # else Pydantic wants Python 3.12 of it
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    client = RemoteInferenceClient(url, [url], 1, base, uses_lora_weight_sync=True)

    async def hand_over(version: str) -> None:
        await client.pause_generation()
        shutil.copytree(version, folder, dirs_exist_ok=True)
        await client.load_lora_adapter("skyrl-lora", folder)
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()

    async def rollout(count: int) -> Any:
        body = {"model": "skyrl-lora", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        try:
            answer = await client.completion({"json": {**body, "return_token_ids": True}})
        except Exception as error:
            return repr(error)[:300]
        return answer["choices"][0]["token_ids"]

    await hand_over(first)
    said = {"1": [await rollout(16)]}
    running = [asyncio.create_task(rollout(tokens)) for _ in range(ROLLOUTS)]
    await asyncio.sleep(1)
    await hand_over(second)
    said |= {"2": [await rollout(16)], "running": await asyncio.gather(*running)}
    began = time.perf_counter()
    await client.unload_lora_adapter("skyrl-lora")
    unload_s = round(time.perf_counter() - began, 4)
    said["unloaded"] = [await rollout(16)]
    print(json.dumps({"said": said, "unload_s": unload_s}))
    await client.teardown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:6], json.loads(sys.argv[6]), int(sys.argv[7])))
