"""Which of our functions vLLM calls in an engine of this process, and from which of vLLM's modules.

The question, as an argument: a list of the base model's directory, the speculation, whether to schedule asynchronously,
and adapters, each a name and its path, null for the base model. The answer, a line of standard output: `called` has our
file, the function's qualified name and the module that called, of every call; `runner` names the model runner's class.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

import lora_plugins
from lora_plugins.vllm_patches import wrapping

PACKAGE = str(Path(lora_plugins.__file__).parent)


class Calls:
    """Notes calls into our package, in every thread that starts later too."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str, str]] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        back = frame.f_back
        while back is not None and back.f_code.co_filename == wrapping.__file__:
            back = back.f_back
        if event == "call" and code.co_filename.startswith(PACKAGE) and back is not None:
            caller = back.f_globals.get("__name__", "")
            self.found.add((code.co_filename[len(PACKAGE) + 1 :], code.co_qualname, caller))


def main() -> None:
    calls = Calls()
    threading.setprofile(calls.note)
    sys.setprofile(calls.note)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, speculation, is_asynchronous, adapters = json.loads(sys.argv[1])
    llm = LLM(
        base, enable_lora=True, max_lora_rank=64, max_loras=2, max_cpu_loras=3, dtype="float32", enforce_eager=True,
        max_model_len=256, max_num_seqs=4, speculative_config=speculation, async_scheduling=is_asynchronous,
    )  # fmt: skip
    requests = [path and LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters, 1)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate(["one two three"] * len(requests), sampling, lora_request=requests, use_tqdm=False)
    llm.llm_engine.remove_lora(1)
    sys.setprofile(None)
    runner = type(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    print("\n" + json.dumps({"called": sorted(calls.found), "runner": f"{runner.__module__}.{runner.__name__}"}))


if __name__ == "__main__":
    main()
