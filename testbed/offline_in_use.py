"""`LLM` with its engine in this process: calls about adapters while every slot has one that a request still uses.

The question is that of `testbed.offline`, with three adapters. The answer, a line of standard output: `said` has what
each call returned, its error's text, or "hangs"; `outputs` the first token ids of the requests, where none hung.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 20.0
TOKENS = 200  # so many that no request ends while another's adapter is loaded


def within(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error's text; "hangs" where there is neither in time."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(call())
        except Exception as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return said[0] if said else "hangs"


def ask(llm: Any, prompt: str, max_tokens: int, loras: list[Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    for lora in loras[:2]:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        engine.add_request(lora.name, prompt, params, lora_request=lora)
    outputs: dict[str, list[int]] = {}

    def step() -> None:
        for one in engine.step():
            outputs[one.request_id] = list(one.outputs[0].token_ids)

    while len(outputs) < 2:
        step()
    assert max(map(len, outputs.values())) < TOKENS
    said = {
        "add_lora": within(lambda: engine.add_lora(loras[2])),
        "pin_lora": within(lambda: engine.pin_lora(1)),
        "remove_lora": within(lambda: engine.remove_lora(1)),
    }
    if "hangs" in said.values():  # in a thread that goes on
        return {"said": said}
    while engine.has_unfinished_requests():
        step()
    said["add_lora after"] = within(lambda: engine.add_lora(loras[2]))
    return {"said": said, "outputs": {name: ids[:max_tokens] for name, ids in outputs.items()}}


def main() -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    base, prompt, max_tokens, adapters = json.loads(sys.argv[1])
    llm = LLM(
        base, enable_lora=True, max_lora_rank=64, max_loras=2, max_cpu_loras=2, dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=16,
    )  # fmt: skip
    loras = [LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters, 1)]
    print("\n" + json.dumps(ask(llm, prompt, max_tokens, loras)), flush=True)
    os._exit(0)  # also past a call that hangs


if __name__ == "__main__":
    main()
