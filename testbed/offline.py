"""vLLM without a server: one batch with every adapter, then a load by hand.

The question, as an argument: a list of the base model's directory, the prompt, the number of tokens, and adapters, each
a name and its path, null for the base model. The answer, a line of standard output: `outputs` has finish reason, stop
reason and token ids of each; `loaded` and `listed` say what became of the load.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, prompt, max_tokens, adapters = json.loads(sys.argv[1])
    llm = LLM(
        base, enable_lora=True, max_lora_rank=64, max_loras=2, max_cpu_loras=3, dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=16,
    )  # fmt: skip
    requests = [path and LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters, 1)]
    outputs = llm.generate(
        [prompt] * len(requests),
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        lora_request=requests,
        use_tqdm=False,
    )
    found = [
        (one.outputs[0].finish_reason, str(one.outputs[0].stop_reason), list(one.outputs[0].token_ids))
        for one in outputs
    ]
    loaded = llm.llm_engine.add_lora(LoRARequest("by-hand", 90, adapters[0][1]))
    print("\n" + json.dumps({"outputs": found, "loaded": loaded, "listed": 90 in llm.llm_engine.list_loras()}))


if __name__ == "__main__":
    main()
