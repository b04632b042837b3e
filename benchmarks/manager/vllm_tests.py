"""Goal of R52 (docs/benchmarks/manager.md#vllms-own-tests-over-our-scheduler).

vLLM's own tests of its scheduler, KV cache, sessions and connectors: on vLLM alone, and over our scheduler.

    python -m benchmarks.manager.vllm_tests DIRECTORY   # vLLM's source archive of the installed version, unpacked

Ends with 1 where the outcome of a test differs. Over ours, the two classes of vLLM's schedulers are those that
`get_scheduler_cls` returns with `lora_lru_manager`, each engine runs LoRA with a planner, and KV blocks are zeroed.
vLLM's tests name no adapter. All run three times: as they are, with one adapter for all requests, and with three in
turn; on both sides, and over ours with the adapters in their slots. What a test needs of the Hub is not here, but for
the configuration of OPT 125M; such a test fails on both sides and says nothing. Writes
`benchmarks/results/vllm_tests.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.record import keep

FILES = (
    "v1/core/test_async_scheduler.py",
    "v1/core/test_deferred_block_free.py",
    "v1/core/test_encoder_cache_manager.py",
    "v1/core/test_output.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_prefix_replay.py",
    "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_scheduler.py",
    "v1/core/test_single_type_kv_cache_manager.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/streaming_input/test_scheduler_streaming.py",
    "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_decode_bench_connector.py",
    "v1/kv_connector/unit/test_error_propagation.py",
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_kv_connector_lifecycle.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
)
# Outcomes that differ by construction, by the test's name, with the reason.
EXPECTED = {
    "test_abort_request_when_structured_output_fsm_cannot_advance": "makes a scheduler without its `__init__`",
    "test_diffusion_scheduler_is_selected_by_default[False]": "compares the class, which is a subclass of vLLM's",
    "test_diffusion_scheduler_is_selected_by_default[True]": "compares the class, which is a subclass of vLLM's",
    "test_fcfs_mixed_blocked_types_remote_load_drains_first": "has a session go on without its next part",
    "test_kv_cache_release_after_keep_pause_preserves_requests": "looks before the empty step in which ours plans",
    "test_scheduler_reset_prefix_cache": "reads the queue by index, which `RequestQueue` does not promise",
}
ADAPTERS = (0, 1, 3)
# https://huggingface.co/facebook/opt-125m, as far as vLLM's scheduler reads it.
_OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048, "do_layer_norm_before": True, "activation_function": "relu",
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "dtype": "float16", "dropout": 0.1,
}  # fmt: skip
# Plugins of pytest; the environment says how many adapters the requests of a test take in turn.
_WITH_ADAPTERS = """
import itertools, os
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

numbers = itertools.cycle(range(1, int(os.environ["ADAPTERS"]) + 1))
original = Request.__init__

def with_adapter(self, *args, lora_request=None, **kwargs):
    if lora_request is None and (number := next(numbers, 0)):
        lora_request = LoRARequest(f"adapter-{number}", number, f"/store/{number}")
    original(self, *args, lora_request=lora_request, **kwargs)

Request.__init__ = with_adapter
"""
_OVER_OURS = """
import functools, os
from lora_plugins.plugin import register_lru_manager
register_lru_manager()
from vllm.config.lora import LoRAConfig
from vllm.v1.core.sched import async_scheduler, diffusion_scheduler, scheduler
from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Load, Loaded
from lora_plugins.vllm_patches.engine_core.scheduler import AdmittingScheduler, with_admission

def with_lora(original):
    @functools.wraps(original)
    def make(cls, vllm_config, *args, **kwargs):
        vllm_config.lora_config = vllm_config.lora_config or LoRAConfig(max_loras=4, max_cpu_loras=8, max_lora_rank=8)
        made = original(cls, vllm_config, *args, **kwargs)
        assert isinstance(made, AdmittingScheduler)
        return made
    return make

def with_residents(original):
    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        planner = self.planner
        for number in range(1, int(os.environ["ADAPTERS"]) + 1):
            spec = AdapterSpec(number, f"adapter-{number}", f"/store/{number}", size_bytes=1)
            planner.load(spec, 0.0, needs_slot=True)
        while commands := planner.plan(0.0).commands:
            loads = [Loaded(it.job, 1, True, 0.01, rank=8) for it in commands if isinstance(it, Load)]
            planner.reported(loads, 0.0)
            planner.carried_out(commands)
    return begin

for module, name in ((scheduler, "Scheduler"), (async_scheduler, "AsyncScheduler")):
    ours = with_admission(getattr(module, name))
    ours.__new__ = staticmethod(with_lora(ours.__new__))
    ours.__init__ = with_residents(ours.__init__)
    setattr(module, name, ours)
"""


def main() -> int:
    """Run both sides and compare; 1 where a test's outcome differs without a reason, or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="vLLM's unpacked sources, of the installed version")
    parser.add_argument("--files", nargs="*", default=FILES, help="below its folder tests/")
    parser.add_argument("--adapters", type=int, nargs="*", default=ADAPTERS, help="for the requests of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        shutil.copytree(options.sources / "tests", made / "tests")
        (made / "tests" / "conftest.py").write_text("")  # its fixtures are of tests that start models
        (made / "with_adapters.py").write_text(_WITH_ADAPTERS)
        (made / "over_ours.py").write_text(_OVER_OURS)
        _put_configuration(made / "hub" / "models--facebook--opt-125m")
        files = [f"tests/{file}" for file in options.files if (made / "tests" / file).is_file()]
        rows, is_right = [], True
        for adapters in options.adapters:
            found = compare(run(made, files, "alone", adapters), run(made, files, "over_ours", adapters), adapters)
            reasons = {name: EXPECTED.get(name.partition("::")[2]) for row in found for name in row["different"]}
            passed = sum(row["passed"] for row in found)
            print(f"{adapters} adapters: {passed} pass on both sides, {len(reasons)} differ")
            print("\n".join(f"  differs: {name}: {reason or 'UNEXPECTED'}" for name, reason in reasons.items()))
            rows, is_right = rows + found, is_right and passed > 0 and None not in reasons.values()
    print(f"written to {keep('vllm_tests', rows)}")
    return int(not is_right)


def compare(alone: dict[str, str], over_ours: dict[str, str], adapters: int) -> list[dict[str, Any]]:
    """For each file how many tests passed, and which have another outcome."""
    rows = []
    for module in sorted({name.partition("::")[0] for name in alone | over_ours}):
        names = sorted(name for name in alone | over_ours if name.partition("::")[0] == module)
        pairs = {name: (alone.get(name), over_ours.get(name)) for name in names}
        row = {
            "adapters": adapters,
            "module": module,
            "passed": sum(pair == ("passed", "passed") for pair in pairs.values()),
            "outcomes": Counter(f"{on_vllm} alone, {on_ours} over ours" for on_vllm, on_ours in pairs.values()),
            "different": [name for name, (on_vllm, on_ours) in pairs.items() if on_vllm != on_ours],
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def run(made: Path, files: list[str], side: str, adapters: int) -> dict[str, str]:
    """The outcome of each test on one side, by the test's name."""
    report = made / f"{side}-{adapters}.xml"
    variables = {
        "HF_HUB_CACHE": str(made / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(made), "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "lora_lru_manager" if side == "over_ours" else "", "ADAPTERS": str(adapters),
    }  # fmt: skip
    plugins = ["-p", "with_adapters", *(["-p", "over_ours"] if side == "over_ours" else [])]
    options = ["-q", "-p", "no:cacheprovider", "--timeout=300", f"--junitxml={report}"]
    with (made / f"{side}-{adapters}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *options, *plugins, *files],
            cwd=made, env={**os.environ, **variables}, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if not report.is_file():
        return {}
    cases = ET.parse(report).getroot().iter("testcase")
    return {f"{case.attrib['classname']}::{case.attrib['name']}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    for found in ("failure", "error", "skipped"):
        if case.find(found) is not None:
            return found
    return "passed"


def _put_configuration(repository: Path) -> None:
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(_OPT))


if __name__ == "__main__":
    sys.exit(main())
