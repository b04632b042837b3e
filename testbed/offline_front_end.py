"""`LLM`, and with ASYNC=1 `AsyncLLM`, as a front end: the cases of tests/front_ends that they can be asked.

The question is that of `testbed.offline`; its adapters are `sql`, `chat`, `missing`, `truncated`, `wrong-shapes`. The
answer, a line of standard output, `said`: for each case what became of it, token ids or the text of an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

LONG, CROWD = 200, 8
ENGINE = {
    "enable_lora": True, "max_lora_rank": 64, "max_loras": 2, "max_cpu_loras": 8, "dtype": "float32",
    "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16,
}  # fmt: skip
Ids = list[int]


class Offline:
    """`LLM`, with the calls of `AsyncLLM`."""

    def __init__(self, base: str, prompt: str) -> None:
        from vllm import LLM

        self._engine, self._prompt, self._count = LLM(base, **ENGINE).llm_engine, prompt, 0  # type: ignore[arg-type]
        for call in ("add_lora", "remove_lora", "pin_lora", "list_loras"):
            setattr(self, call, self._awaitable(getattr(self._engine, call)))

    @staticmethod
    def _awaitable(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def called(*arguments: Any) -> Any:
            return call(*arguments)

        return called

    async def begun(self, tokens: int, loras: Sequence[Any]) -> list[Any]:
        """Requests of which the first has its first token."""
        from vllm import SamplingParams

        sampling, names = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), []
        for lora in loras:
            self._count += 1
            names.append(f"r{self._count}")
            self._engine.add_request(names[-1], self._prompt, sampling, lora_request=lora)
        ended: dict[str, Any] = {}
        while not any(output.outputs[0].token_ids for output in self._step(ended)):
            if not self._engine.has_unfinished_requests():
                break
        return [(name, ended) for name in names]

    def _step(self, ended: dict[str, Any]) -> list[Any]:
        outputs = self._engine.step()
        ended |= {output.request_id.partition("-")[0]: output for output in outputs if output.finished}
        return outputs

    async def end(self, begun: Any) -> Ids | str:
        name, ended = begun
        while name not in ended:
            self._step(ended)
        (answer,) = ended[name].outputs
        return str(answer.stop_reason) if answer.finish_reason == "error" else list(answer.token_ids)

    async def leave(self, begun: Any) -> None:
        self._engine.abort_request([begun[0]], internal=False)

    async def is_idle(self) -> bool:
        return not self._engine.has_unfinished_requests()

    def close(self) -> None: ...


class Online:
    """`AsyncLLM`."""

    def __init__(self, base: str, prompt: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(base, **ENGINE))  # type: ignore[arg-type]
        self._prompt, self._count = prompt, 0
        for call in ("add_lora", "remove_lora", "pin_lora", "list_loras"):
            setattr(self, call, getattr(self._engine, call))

    async def begun(self, tokens: int, loras: Sequence[Any]) -> list[Any]:
        first = asyncio.Event()
        tasks = [asyncio.create_task(self._ask(tokens, lora, first)) for lora in loras]
        await first.wait()
        return tasks

    async def _ask(self, tokens: int, lora: Any, first: asyncio.Event) -> Ids:
        from vllm import SamplingParams

        self._count += 1
        sampling, ids = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), Ids()
        try:
            async for output in self._engine.generate(self._prompt, sampling, f"r{self._count}", lora_request=lora):
                ids = list(output.outputs[0].token_ids)
                first.set()
        finally:
            first.set()
        return ids

    async def end(self, begun: asyncio.Task[Ids]) -> Ids | str:
        from fastapi import HTTPException
        from vllm.exceptions import VLLMClientError, VLLMNotFoundError

        try:
            return await begun
        except (HTTPException, VLLMClientError, VLLMNotFoundError) as error:
            return str(getattr(error, "detail", error))

    async def leave(self, begun: asyncio.Task[Ids]) -> None:
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)

    async def is_idle(self) -> bool:
        return not self._engine.output_processor.has_unfinished_requests()

    def close(self) -> None:
        self._engine.shutdown()


async def cases(front_end: Any, tokens: int, paths: dict[str, str]) -> dict[str, Any]:
    """What becomes of each case, in order, on one engine."""
    from vllm.lora.request import LoRARequest

    numbers: dict[str, int] = {}

    def lora(name: str, path: str | None = None, **more: Any) -> Any:
        return LoRARequest(name, numbers.setdefault(name, len(numbers) + 1), paths[path or name], **more)

    async def asked(*loras: Any) -> list[Ids | str]:
        return [await front_end.end(one) for one in await front_end.begun(tokens, loras)]

    async def refused(call: Awaitable[Any]) -> str:
        try:
            return repr(await call)
        except Exception as error:
            return str(getattr(error, "detail", error))

    said: dict[str, Any] = {"base": await asked(None), "names": await asked(lora("sql"), lora("chat"), None)}
    said["unknown"] = await asked(lora("missing"))
    for fault in ("truncated", "wrong-shapes"):
        said[fault] = [*await asked(lora(fault)), *await asked(lora(f"{fault}, repaired", "sql"))]
    said["cold"] = await asked(*[lora("cold", "chat")] * CROWD)
    await front_end.add_lora(lora("swapped", "sql"))
    said["swapped"] = await asked(lora("swapped", "sql"))
    (running,) = await front_end.begun(LONG, [lora("swapped", "sql")])
    said["swap"] = await refused(front_end.add_lora(lora("swapped", "chat", load_inplace=True)))
    said["swapped"] += await asked(lora("swapped", "chat"))
    said["overtaken"] = await front_end.end(running)
    said["broken update"] = await refused(front_end.add_lora(lora("swapped", "truncated", load_inplace=True)))
    said["after a broken update"] = await asked(lora("swapped", "chat"))
    said["prefetched"] = [
        await front_end.add_lora(lora("fetched", "chat")),
        await _is_listed(front_end, lora("fetched", "chat")),
    ]
    said["prefetched"] += await asked(lora("fetched", "chat"))
    said["pinned"] = [await front_end.pin_lora(numbers["fetched"])]
    await asked(lora("sql"), lora("chat"), lora("cold", "chat"))
    said["pinned"] += await asked(lora("fetched", "chat"))
    said["unloaded"] = [
        await front_end.remove_lora(numbers["fetched"]),
        await _is_listed(front_end, lora("fetched", "chat")),
    ]
    said["unloaded"] += await asked(lora("fetched", "sql"))
    for one in await front_end.begun(LONG, [lora("sql"), lora("chat")]):
        await front_end.leave(one)
    said["left"] = [await front_end.is_idle(), *await asked(lora("sql"))]
    return said


async def _is_listed(front_end: Any, lora: Any) -> bool:
    return lora.lora_int_id in await front_end.list_loras()


async def run() -> dict[str, Any]:
    base, prompt, tokens, adapters = json.loads(sys.argv[1])
    front_end = Online(base, prompt) if os.environ.get("ASYNC") == "1" else Offline(base, prompt)
    try:
        return await cases(front_end, tokens, dict(adapters))
    finally:
        front_end.close()


def main() -> None:
    print("\n" + json.dumps({"said": asyncio.run(run())}), flush=True)


if __name__ == "__main__":
    main()
