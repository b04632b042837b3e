"""vLLM without a server: a request with `prompt_logprobs` alone, and then in a batch with others.

The question, as an argument, is that of `testbed.offline`. The answer, a line of standard output: `said` has, of each
batch, the logprobs of the first request's prompt, and the token ids of each request.
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
        max_model_len=256, max_num_seqs=16, enable_prefix_caching=False,
    )  # fmt: skip
    requests = [path and LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters, 1)]
    said = []
    for batch in (requests[:1], requests):
        parameters = [
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0 if first else None)
            for first in (True, *(False for _ in batch[1:]))
        ]
        outputs = llm.generate([prompt] * len(batch), parameters, lora_request=batch, use_tqdm=False)
        logprobs = [next(iter(one.values())).logprob for one in outputs[0].prompt_logprobs[1:]]
        said.append([logprobs, [list(one.outputs[0].token_ids) for one in outputs]])
    print("\n" + json.dumps({"said": said}))


if __name__ == "__main__":
    main()
