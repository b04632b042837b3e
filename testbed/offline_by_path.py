"""`LLM`, and with ASYNC=1 `AsyncLLM`, over one directory whose adapter changes: which version answers each request.

The question is that of `testbed.offline`, with two adapters: the versions that the directory has one after the other,
and a last one, the directory itself. The answer, a line of standard output, `said`: the token ids after each step.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

STUB = "/dummy_lora_path"  # as SkyRL asks for what it has added
ENGINE = {
    "enable_lora": True, "max_lora_rank": 64, "max_loras": 1, "dtype": "float32", "enforce_eager": True,
    "max_model_len": 512, "max_num_seqs": 4, "block_size": 32, "enable_prefix_caching": True,
}  # fmt: skip


async def steps(
    ask: Callable[[Any], Awaitable[list[int]]], add: Callable[[Any], Awaitable[bool]], adapters: list[tuple[str, str]]
) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    (_, one), (_, other), (_, path) = adapters
    said: dict[str, Any] = {}

    def lies_there(version: str) -> None:
        shutil.copytree(version, path, dirs_exist_ok=True)

    lies_there(one)
    said["first"] = await ask(LoRARequest("policy", 1, path))
    lies_there(other)
    said["files changed"] = await ask(LoRARequest("policy", 1, path))
    said["in place"] = await ask(LoRARequest("policy", 1, path, load_inplace=True))
    said["after it"] = await ask(LoRARequest("policy", 1, path))
    lies_there(one)
    said["added"] = await add(LoRARequest("policy", 1, path))
    said["stub"] = await ask(LoRARequest("policy", 1, STUB))
    lies_there(other)
    said["added in place"] = await add(LoRARequest("policy", 1, path, load_inplace=True))
    said["stub again"] = await ask(LoRARequest("policy", 1, STUB))
    said["another"] = await ask(LoRARequest("another", 2, one))
    shutil.rmtree(Path(path))
    said["files gone"] = await ask(LoRARequest("policy", 1, path))
    said["stub at last"] = await ask(LoRARequest("policy", 1, STUB))
    return said


def offline(base: str, prompt: str, max_tokens: int, adapters: list[tuple[str, str]]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(base, **ENGINE)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    async def ask(lora: Any) -> list[int]:
        return list(llm.generate(prompt, sampling, lora_request=lora, use_tqdm=False)[0].outputs[0].token_ids)

    async def add(lora: Any) -> bool:
        return bool(llm.llm_engine.add_lora(lora))

    return asyncio.run(steps(ask, add, adapters))


async def online(base: str, prompt: str, max_tokens: int, adapters: list[tuple[str, str]]) -> dict[str, Any]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(base, **ENGINE))  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    asked: list[Any] = []

    async def ask(lora: Any) -> list[int]:
        asked.append(lora)
        answers = [one async for one in engine.generate(prompt, sampling, f"r{len(asked)}", lora_request=lora)]
        return list(answers[-1].outputs[0].token_ids)

    try:
        return await steps(ask, engine.add_lora, adapters)
    finally:
        engine.shutdown()


def main() -> None:
    question = json.loads(sys.argv[1])
    said = asyncio.run(online(*question)) if os.environ.get("ASYNC") == "1" else offline(*question)
    print("\n" + json.dumps({"said": said}), flush=True)


if __name__ == "__main__":
    main()
