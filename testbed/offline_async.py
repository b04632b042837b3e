"""`AsyncLLM` without a server: one batch with every adapter at once, then the same one by one.

The question is that of `testbed.offline`. The answer, a line of standard output: `outputs` and `again` have of each
request its token ids, or the status and text of its error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def ask(engine: Any, number: int, prompt: str, max_tokens: int, name: str, path: str | None, part: str) -> Any:
    from fastapi import HTTPException
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    last = None
    try:
        async for output in engine.generate(
            prompt,
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            f"{part}-{number}",
            lora_request=path and LoRARequest(name, number, path),
        ):
            last = output
    except HTTPException as error:
        return [error.status_code, str(error.detail)]
    return list(last.outputs[0].token_ids)


async def main_async() -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    base, prompt, max_tokens, adapters = json.loads(sys.argv[1])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            base, enable_lora=True, max_lora_rank=64, max_loras=2, max_cpu_loras=8, dtype="float32",
            enforce_eager=True, max_model_len=256, max_num_seqs=16,
        )
    )  # fmt: skip
    try:
        numbered = list(enumerate(adapters, 1))
        asked = (ask(engine, number, prompt, max_tokens, name, path, "at-once") for number, (name, path) in numbered)
        outputs = await asyncio.gather(*asked)
        again = [
            await ask(engine, number, prompt, max_tokens, name, path, "again") for number, (name, path) in numbered
        ]
    finally:
        engine.shutdown()
    print("\n" + json.dumps({"outputs": outputs, "again": again}))


def main() -> None:
    asyncio.run(main_async())


if __name__ == "__main__":
    main()
