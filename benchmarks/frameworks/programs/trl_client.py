"""TRL's own VLLMClient unloads adapters beside eight streams: URL ADAPTER_DIRECTORY IDLE IN_USE; prints a line of JSON.

So many names are loaded and unloaded that nobody uses, then so many with a rollout that has begun.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import requests
from accelerate import PartialState

STREAMS, TOKENS = 8, 48


def main(url: str, directory: str, idle: int, in_use: int) -> None:
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState(cpu=True)
    client, mark, has_ended = VLLMClient(url), f"unloads-{time.time_ns()}", threading.Event()

    def rollout(model: str, tokens: int, on_first: Any = lambda: None) -> tuple[int, str | None]:
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        count, reason = 0, None
        with requests.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, stream=True) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "choices" not in chunk:
                        return count, line.decode()[:200]
                    (choice,) = chunk["choices"]
                    count += len(choice["token_ids"] or ())
                    reason = choice["finish_reason"] or reason
                    on_first()
        on_first()
        return count, reason

    def stream() -> None:
        while not has_ended.is_set():
            rollout(f"{mark}-streams", 64)

    def unload_s(name: str) -> float:
        began = time.perf_counter()
        client.unload_lora_adapter(name)
        return round(time.perf_counter() - began, 5)

    client.load_lora_adapter(f"{mark}-streams", directory)
    streams = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for one in streams:
        one.start()
    rows: dict[str, list[Any]] = {"idle_s": [], "in_use_s": [], "faults": []}
    for number in range(idle):
        client.load_lora_adapter(f"{mark}-{number}", directory)
        rows["idle_s"].append(unload_s(f"{mark}-{number}"))
    for number in range(in_use):
        name, has_begun, ended = f"{mark}-used-{number}", threading.Event(), []
        client.load_lora_adapter(name, directory)
        asked = threading.Thread(target=lambda: ended.append(rollout(name, TOKENS, has_begun.set)))  # noqa: B023
        asked.start()
        has_begun.wait()
        rows["in_use_s"].append(unload_s(name))
        asked.join()
        rows["faults"] += [one for one in ended if one != (TOKENS, "length")]
    has_ended.set()
    for one in streams:
        one.join()
    client.unload_lora_adapter(f"{mark}-streams")
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
