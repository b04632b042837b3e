"""`AsyncLLM` with one slot: a session whose input comes in parts, and requests for another adapter between them.

The question is that of `testbed.offline`, with two adapters: the session's, and the other's. The answer, a line of
standard output, `said`: the token ids of `other` (asked for while the session is idle), of `others after` (two at once,
between later parts), of the whole `session`, and of the same session `alone`; null where they did not come in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

PATIENCE_S = 30.0
PARTS = 3
Answer = TypeVar("Answer")


async def within(answer: Awaitable[Answer], answers: int = 1) -> Answer | None:
    try:
        return await asyncio.wait_for(answer, answers * PATIENCE_S)
    except TimeoutError:
        return None


class Session:
    """A request whose parts are given one by one."""

    def __init__(self, engine: Any, prompt: str, max_tokens: int, lora: Any, name: str) -> None:
        self._parts: asyncio.Queue[str | None] = asyncio.Queue()
        self._grown = asyncio.Condition()
        self._prompt, self._max_tokens = prompt, max_tokens
        self.ids: list[int] = []
        self.reading = asyncio.create_task(self._read(engine, lora, name))

    async def _input(self) -> AsyncIterator[Any]:
        from vllm.engine.protocol import StreamingInput

        while (part := await self._parts.get()) is not None:
            yield StreamingInput(prompt=part)

    async def _read(self, engine: Any, lora: Any, name: str) -> None:
        async for output in engine.generate(
            self._input(), sampling(self._max_tokens, is_delta=True), name, lora_request=lora
        ):
            async with self._grown:
                self.ids += output.outputs[0].token_ids
                self._grown.notify_all()

    async def turn(self) -> None:
        """Give it a part, and wait for all that it says."""
        wanted = len(self.ids) + self._max_tokens
        await self._parts.put(self._prompt)
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.ids) >= wanted)

    async def end(self) -> list[int]:
        await self._parts.put(None)
        await self.reading
        return self.ids


def sampling(max_tokens: int, *, is_delta: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


async def ask(engine: Any, prompt: str, max_tokens: int, lora: Any, name: str) -> list[int]:
    answers = [one async for one in engine.generate(prompt, sampling(max_tokens), name, lora_request=lora)]
    return list(answers[-1].outputs[0].token_ids)


async def converse(engine: Any, prompt: str, max_tokens: int, loras: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    own, others = loras

    async def with_others() -> list[int]:
        session = Session(engine, prompt, max_tokens, own, "session")
        await session.turn()
        said["other"] = await within(ask(engine, prompt, max_tokens, others, "other"))
        asked = []
        for number in range(1, PARTS):
            asked.append(asyncio.create_task(ask(engine, prompt, max_tokens, others, f"after-{number}")))
            await session.turn()
        said["others after"] = list(await asyncio.gather(*asked))
        return await session.end()

    async def alone() -> list[int]:
        session = Session(engine, prompt, max_tokens, own, "alone")
        for _ in range(PARTS):
            await session.turn()
        return await session.end()

    said["alone"] = await within(alone())
    said["session"] = await within(with_others(), PARTS)
    return said


async def main_async() -> None:
    from vllm import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    base, prompt, max_tokens, adapters = json.loads(sys.argv[1])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            base, enable_lora=True, max_lora_rank=64, max_loras=1, dtype="float32", enforce_eager=True,
            max_model_len=256, max_num_seqs=16,
        )
    )  # fmt: skip
    loras = [LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters, 1)]
    try:
        said = await converse(engine, prompt, max_tokens, loras)
    finally:
        engine.shutdown()
    print("\n" + json.dumps({"said": {"other": None, "others after": None, **said}}), flush=True)
    os._exit(0)  # also past a request that hangs


def main() -> None:
    asyncio.run(main_async())


if __name__ == "__main__":
    main()
