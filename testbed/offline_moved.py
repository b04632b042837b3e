"""`LLM` whose caller puts another version in the place of one that runs: what runs, and what comes after it.

The question is that of `testbed.offline`, with two adapters: the versions, in order. The answer, a line of standard
output, `said`: `moved`, the token ids of what ran; `versions`, what its output says of them; `late`, of one that came
after; `kept` and `again`, of two with the first version's id and files before and after, for their cached prefixes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

BEFORE = 7  # tokens that are computed with the first version


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, prompt, max_tokens, ((_, first), (_, second)) = json.loads(sys.argv[1])
    llm = LLM(
        base, enable_lora=True, max_lora_rank=64, max_loras=1, max_cpu_loras=3, dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=16,
    )  # fmt: skip
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    ended: dict[str, Any] = {}
    running: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            running[output.request_id.partition("-")[0]] = len(output.outputs[0].token_ids)
            if output.finished:
                ended[output.request_id.partition("-")[0]] = output

    def ask(name: str, engine_id: int, path: str) -> None:
        engine.add_request(name, prompt, sampling, lora_request=LoRARequest("policy", engine_id, path))

    def finish() -> None:
        while engine.has_unfinished_requests():
            step()

    assert engine.add_lora(LoRARequest("policy", 1, first))
    ask("kept", 1, first)
    finish()
    ask("moved", 1, first)
    while running.get("moved", 0) < BEFORE:
        step()
    assert engine.add_lora(LoRARequest("policy", 1, second, load_inplace=True))
    ask("late", 1, "/a/stub")
    finish()
    assert engine.add_lora(LoRARequest("policy", 1, first, load_inplace=True))
    ask("again", 1, first)
    finish()
    said: dict[str, Any] = {name: list(output.outputs[0].token_ids) for name, output in ended.items()}
    said["versions"] = (ended["moved"].kv_transfer_params or {}).get("lora_versions")
    said["cached"] = ended["again"].num_cached_tokens
    print("\n" + json.dumps({"said": said}), flush=True)


if __name__ == "__main__":
    main()
