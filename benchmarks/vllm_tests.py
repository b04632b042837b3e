"""vLLM's own tests of its scheduler, KV cache, sessions and connectors: on vLLM alone, and over our scheduler.

    pip download --no-deps --no-binary vllm vllm==0.32.0   # the installed version; unpack it outside the repository
    python -m benchmarks.vllm_tests DIRECTORY              # ends with 1 where the outcome of a test differs

Over ours, the two classes of vLLM's schedulers are those that `get_scheduler_cls` returns with `lora_lru_manager`,
each engine runs LoRA with a planner, and KV blocks are zeroed. vLLM's tests name no adapter: they show that requests
without one pass as they pass in vLLM. What a test needs of the Hub is not here, but for the configuration of OPT 125M;
such a test fails on both sides and says nothing. Writes `benchmarks/results/vllm_tests.json`.
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
}
# https://huggingface.co/facebook/opt-125m, as far as vLLM's scheduler reads it.
_OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048, "do_layer_norm_before": True, "activation_function": "relu",
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "dtype": "float16", "dropout": 0.1,
}  # fmt: skip
_OVER_OURS = """
import functools
from lora_plugins.plugin import register_lru_manager
register_lru_manager()
from vllm.config.lora import LoRAConfig
from vllm.v1.core.sched import async_scheduler, scheduler
from lora_plugins.vllm_patches.engine_core.scheduler import AdmittingScheduler, with_admission

def with_lora(original):
    @functools.wraps(original)
    def make(cls, vllm_config, *args, **kwargs):
        vllm_config.lora_config = vllm_config.lora_config or LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=8)
        made = original(cls, vllm_config, *args, **kwargs)
        assert isinstance(made, AdmittingScheduler)
        return made
    return make

for module, name in ((scheduler, "Scheduler"), (async_scheduler, "AsyncScheduler")):
    ours = with_admission(getattr(module, name))
    ours.__new__ = staticmethod(with_lora(ours.__new__))
    setattr(module, name, ours)
"""


def main() -> int:
    """Run both sides and compare; 1 where a test's outcome differs without a reason, or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="vLLM's unpacked sources, of the installed version")
    parser.add_argument("--files", nargs="*", default=FILES, help="below its folder tests/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        shutil.copytree(options.sources / "tests", made / "tests")
        (made / "tests" / "conftest.py").write_text("")  # its fixtures are of tests that start models
        (made / "over_ours.py").write_text(_OVER_OURS)
        _put_configuration(made / "hub" / "models--facebook--opt-125m")
        files = [f"tests/{file}" for file in options.files if (made / "tests" / file).is_file()]
        rows = compare(run(made, files, "alone"), run(made, files, "over_ours"))
    different = [name for row in rows for name in row["different"]]
    reasons = {name: EXPECTED.get(name.partition("::")[2]) for name in different}
    print(f"{sum(row['passed'] for row in rows)} pass on both sides, {len(different)} differ")
    print("\n".join(f"  differs: {name}: {reason or 'UNEXPECTED'}" for name, reason in reasons.items()))
    print(f"written to {keep('vllm_tests', rows)}")
    return int(None in reasons.values() or not any(row["passed"] for row in rows))


def compare(alone: dict[str, str], over_ours: dict[str, str]) -> list[dict[str, object]]:
    """For each file how many tests passed, and which have another outcome."""
    rows = []
    for module in sorted({name.partition("::")[0] for name in alone | over_ours}):
        names = sorted(name for name in alone | over_ours if name.partition("::")[0] == module)
        pairs = {name: (alone.get(name), over_ours.get(name)) for name in names}
        row = {
            "module": module,
            "passed": sum(pair == ("passed", "passed") for pair in pairs.values()),
            "outcomes": Counter(f"{on_vllm} alone, {on_ours} over ours" for on_vllm, on_ours in pairs.values()),
            "different": [name for name, (on_vllm, on_ours) in pairs.items() if on_vllm != on_ours],
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def run(made: Path, files: list[str], side: str) -> dict[str, str]:
    """The outcome of each test on one side, by the test's name."""
    report = made / f"{side}.xml"
    variables = {
        "HF_HUB_CACHE": str(made / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(made), "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "lora_lru_manager" if side == "over_ours" else "",
    }  # fmt: skip
    plugin = ["-p", "over_ours"] if side == "over_ours" else []
    options = ["-q", "-p", "no:cacheprovider", "--timeout=300", f"--junitxml={report}"]
    with (made / f"{side}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *options, *plugin, *files],
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
