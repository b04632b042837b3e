"""What it costs that logits are searched for NaN, and that KV blocks are zeroed before they are used.

    python -m benchmarks.finite_answers [--rounds N] [--keep]

One engine in this process, a base model of random weights, eight adapters; a round is the decode steps of a batch of
requests, each for an adapter. What is printed is the share of a step that the two take, which a noisy machine changes
less than the difference between steps with them and without. With `--keep` the result goes to
benchmarks/results/finite_answers.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import keep
from testbed.models import AdapterSpec, build_adapter, build_base

REQUESTS, TOKENS, BLOCK = 16, 64, 32
MODEL = {"hidden": 896, "layers": 12, "vocab": 32_000, "intermediate": 4864}


class Timer:
    """Seconds in a function, whatever else runs meanwhile."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def round_s(engine: Any, requests: list[Any]) -> tuple[float, int]:
    """The seconds of its steps after the first, and their number."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for number, lora in enumerate(requests):
        prompt = {"prompt_token_ids": [3 + number] * (8 + number)}  # their blocks end in different steps
        engine.llm_engine.add_request(str(number), prompt, sampling, lora_request=lora)
    engine.llm_engine.step()
    began, steps = time.perf_counter(), 0
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
        steps += 1
    return time.perf_counter() - began, steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "lora_lru_manager,lora_kernels"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["LORA_PLUGINS_STORE_DIR"] = str(home / "store")
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        base = build_base(home / "base", **MODEL)
        specs = [AdapterSpec(f"adapter-{number}", 16) for number in range(8)]
        for spec in specs:
            build_adapter(base, home / "adapters", spec)
        llm = LLM(
            str(base), enable_lora=True, max_loras=8, max_cpu_loras=8, max_lora_rank=16, max_model_len=256,
            block_size=BLOCK, dtype="float32", enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28,
        )  # fmt: skip
        loras = [LoRARequest(spec.name, 1 + n, str(home / "adapters" / spec.name)) for n, spec in enumerate(specs)]
        requests = [loras[number % len(loras)] for number in range(REQUESTS)]
        round_s(llm, requests)
        from vllm.v1.worker import gpu_model_runner
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        found, zeroed = Timer(gpu_model_runner, "count_nans_per_row"), Timer(CPUModelRunner, "_zero_block_ids")
        rows = []
        for _ in range(options.rounds):
            found.seconds = zeroed.seconds = 0.0
            seconds, steps = round_s(llm, requests)
            parts = {"nan": found.seconds / seconds, "zeroed": zeroed.seconds / seconds}
            rows.append({"step_ms": seconds / steps * 1e3, **parts})
    for name, unit in (("step_ms", "ms"), ("nan", "of it"), ("zeroed", "of it")):
        values = sorted(row[name] for row in rows)
        print(f"{name}: median {statistics.median(values):.5f} {unit}, {values[0]:.5f} to {values[-1]:.5f}")
    assert all(row["nan"] > 0 and row["zeroed"] > 0 for row in rows), "one of them was not called"
    if options.keep:
        keep("finite_answers", rows, model=MODEL, requests=REQUESTS)


if __name__ == "__main__":
    main()
