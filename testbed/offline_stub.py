"""`LLM`, and with ASYNC=1 `AsyncLLM`, whose workers are given tensors: requests name the id, and any path.

The question is that of `testbed.offline`, with three adapters: the first is given as tensors, the second follows it
under the same id, and the last is in a repository of the Hub, whose id is the path of some requests for the first. The
answer, a line of standard output, `said`: the token ids after each step, or the text of an error.

As verl 0.9.1 has it (`verl.workers.rollout.vllm_rollout.utils`): for ever one id, one name and the path
`simon_lora_path`. In this process `llm_engine.add_lora` is given the tensors too, as by ms-swift.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import httpx

from testbed.frameworks.engines import SETTINGS, Async, Engine, Offline
from testbed.frameworks.tensors import patch_loader, request_with_tensors
from testbed.frameworks.workers import VERL_ID

BARE, EMPTY, RELATIVE, LIKE_A_REPO, REPO = "simon_lora_path", "", "not/there/at/all", "team/none", "team/sql"
STUBS = (BARE, EMPTY, RELATIVE, LIKE_A_REPO, REPO)
IN_PROCESS_ID, BY_PATH_ID = 7, 8
UNASKED = "/nothing-was-asked-before"  # of the Hub
OTHERS = range(30, 34)  # as many as there is room for in host memory


def request(number: int, path: str, name: str = "") -> Any:
    from vllm.lora.request import LoRARequest

    made = LoRARequest(name or str(number), number, path or BARE)
    made.lora_path = path  # which vLLM's own constructor refuses, where it is empty
    return made


async def steps(engine: Engine, adapters: list[tuple[str, str]]) -> dict[str, Any]:
    (_, first), (_, second), (_, other) = adapters
    said: dict[str, Any] = {}

    async def push_out() -> None:
        for number in OTHERS:
            await engine.ask(request(number, other))

    await engine.workers("frameworks_remove_and_add_tensors", VERL_ID, first)
    for path in STUBS:
        said[f"given: {path!r}"] = await engine.ask(request(VERL_ID, path))
    said["given: another name"] = await engine.ask(request(VERL_ID, LIKE_A_REPO, "policy"))
    await engine.workers("frameworks_remove_and_add_tensors", VERL_ID, second)
    await push_out()
    for path in STUBS:
        said[f"given again: {path!r}"] = await engine.ask(request(VERL_ID, path))
    for path in STUBS:
        await engine.call("add_lora", request(VERL_ID, path))
        said[f"added by id: {path!r}"] = await engine.ask(request(VERL_ID, path))
    await engine.call("add_lora", request(BY_PATH_ID, first))
    for when in ("by path", "by path, evicted"):
        for path in STUBS:
            said[f"{when}: {path!r}"] = await engine.ask(request(BY_PATH_ID, path))
        await push_out()
    if isinstance(engine, Offline) and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        patch_loader()
        await engine.call("add_lora", request_with_tensors(str(IN_PROCESS_ID), IN_PROCESS_ID, first, load_inplace=True))
        for when in ("in process", "in process, evicted"):
            for path in STUBS:
                said[f"{when}: {path!r}"] = await engine.ask(request(IN_PROCESS_ID, path))
            await push_out()
    said["calls"] = [call for call in engine.calls if call[1] not in (True, [[True, True]], [[False, True]])]
    if (hub := os.environ.get("HF_ENDPOINT")) is not None:
        httpx.get(f"{hub}{UNASKED}")
    # No engine has the id any more: a request's path is what there is to serve.
    await engine.workers("frameworks_remove", VERL_ID)
    said["lost by workers"] = [await engine.ask(request(VERL_ID, REPO)) for _ in range(2)]
    await engine.call("remove_lora", VERL_ID)
    said["removed"] = {path: await engine.ask(request(VERL_ID, path)) for path in (BARE, LIKE_A_REPO, REPO)}
    return said


def main() -> None:
    base, _, _, adapters = json.loads(sys.argv[1])
    settings = {"model": base, **SETTINGS, "max_lora_rank": 64}

    async def run() -> dict[str, Any]:
        engine = Async(**settings) if os.environ.get("ASYNC") == "1" else Offline(**settings)
        try:
            return await steps(engine, adapters)
        finally:
            if isinstance(engine, Async):
                engine.engine.shutdown()

    print("\n" + json.dumps({"said": asyncio.run(run())}), flush=True)


if __name__ == "__main__":
    main()
