"""The real engine with our Triton wrapper on a machine without a GPU: vLLM on the CPU, Triton in its interpreter.

    TRITON_INTERPRET=1 python -m testbed.interpreted_engine QUESTION > answer.json

The question: `base` (a directory), `adapters` (their root), `tables` (a directory with a tuning table for `cpu`),
`settings` for `vllm.LLM`, and `batches`: lists of adapter names, null for the base model, each batch one call. The
answer: for each batch the token ids of each row.

vLLM's GPU wrapper imports its own Triton parts only where it finds a GPU. It is handed one, a plain torch class,
so that it can be made; no code of ours or vLLM's is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from testbed.models import PROMPT


def main() -> None:
    question = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine prints to standard output
    take_triton(Path(question["tables"]))
    json.dump(ask(question), answers)
    answers.close()


def take_triton(tables: Path) -> None:
    """What `vllm_patches.worker.punica_wrapper.patch` does on a GPU."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu

    from lora_plugins.kernels import tuning
    from lora_plugins.kernels.dispatch import TRITON_WRAPPER
    from lora_plugins.vllm_patches.worker import punica_wrapper

    tuning.PACKAGED = tables
    punica_gpu.LoRAKernelMeta = LoRAKernelMeta
    punica_wrapper.use_wrapper(TRITON_WRAPPER)


def ask(question: dict[str, Any]) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(question["base"], enable_lora=True, enforce_eager=True, **question["settings"])
    sampling = SamplingParams(temperature=0, max_tokens=question["max_tokens"], ignore_eos=True)
    ids: dict[str, int] = {}
    answers = []
    for batch in question["batches"]:
        requests = [
            name and LoRARequest(name, ids.setdefault(name, len(ids) + 1), os.path.join(question["adapters"], name))
            for name in batch
        ]
        outputs = llm.generate([PROMPT] * len(batch), sampling, lora_request=requests, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    return answers


if __name__ == "__main__":
    main()
