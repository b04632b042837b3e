"""Each patch of ours that a model runner meets: called by the runner, or the page says what stands in its place."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import lora_plugins
from testbed import v2_runner
from testbed.bed import prepare
from testbed.models import DEMO_ADAPTERS
from tests.deployments import test_drafts as drafts
from tests.e2e.test_offline import ran

PACKAGE = Path(lora_plugins.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference" / "deployments.md"
MARK = "<!-- table: written by tests/v2_runner/test_patches.py -->"
RUNS = ("V1, CPU", "V1, CUDA", "V2, CPU", "V2, CUDA")
RUNNERS = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}


@dataclass(frozen=True)
class Patched:
    """A symbol of vLLM, and the code of ours that takes its place.

    Attributes:
        code: a file of ours and the qualified name of the function. called_in: the module that calls, where one
            function of ours stands in several. by: the runners that reach it, where its module does not say.
        instead: what does the same in the other runners.
    """

    symbol: str
    code: tuple[str, str]
    called_in: str = ""
    by: tuple[str, ...] = ()
    instead: str = ""

    @property
    def reached(self) -> tuple[str, ...]:
        """The runners, by vLLM's module."""
        module = self.symbol.partition(":")[0]
        if self.by:
            return self.by
        if module == "vllm.v1.worker.cpu_model_runner":
            return RUNS[:1]
        if module == "vllm.v1.worker.gpu_model_runner":
            return RUNS[:2]
        return RUNS[2:] if module.startswith("vllm.v1.worker.gpu.") else RUNS


_WORKER, _MODEL, _STATE, _PUNICA = (
    f"vllm_patches/worker/{name}.py" for name in ("worker_base", "model_runner", "adapter_rows", "punica_wrapper")
)
_WRAPPER, _GPU = "vllm.v1.worker.worker_base:WorkerWrapperBase.", "vllm.v1.worker.gpu."
_COUNTS, _NAN_V2 = (_MODEL, "not_finite_in_rows"), "V1 counts in `count_nans_per_row`"
_PROMPTS = (_MODEL, "_compute_prompt_logprobs")
_CPU = ("V1, CPU", "V2, CPU")
CALLED_BY = {
    RUNS[:1]: "V1 on CPUs",
    RUNS[:2]: "V1",
    RUNS[1:]: "all but V1 on CPUs",
    RUNS[2:]: "V2",
    _CPU: "CPUs",
}
PATCHES = (
    Patched(f"{_WRAPPER}init_device", (_WORKER, "_init_device")),
    Patched(f"{_WRAPPER}execute_model", (_WORKER, "_execute_model")),
    Patched(f"{_WRAPPER}sample_tokens", (_WORKER, "_sample_tokens")),
    Patched(
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        (_WORKER, "_with_reports.<locals>.<lambda>"),
        by=RUNS[1:],
        instead="vLLM on CPUs schedules V1 step by step: reports are in the output itself",
    ),
    Patched(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
        ("vllm_patches/worker/lora_model_runner_mixin.py", "_load_lora_model"),
    ),
    Patched(
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.set_active_adapters",
        ("worker/manager.py", "PlannedWorkerLoRAManager.set_active_adapters"),
    ),
    Patched(
        "vllm.lora.model_manager:LRUCacheLoRAModelManager.lora_slots",
        ("worker/model_manager.py", "PlannedModelManager.lora_slots"),
    ),
    Patched("vllm.lora.lora_model:safetensors", ("worker/weights_file.py", "open_weights")),
    Patched("vllm.lora.request:LoRARequest.__hash__", ("vllm_patches/lora_request.py", "_hash")),
    Patched(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("vllm_patches/engine_core/scheduler.py", "AdmittingScheduler.update_from_output"),
    ),
    Patched("vllm.v1.engine.core:get_kv_cache_configs", (_MODEL, "_get_kv_cache_configs")),
    Patched(
        "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
        (_MODEL, "_OrRunsAdapters.__init__.<locals>.<lambda>"),
        "vllm.v1.worker.gpu_worker",
    ),
    Patched(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids",
        (_MODEL, "_zero_block_ids"),
        instead="vLLM's `KVBlockZeroer` zeroes the blocks of every attention layer, of sliding windows too",
    ),
    Patched(
        "vllm.v1.worker.gpu_model_runner:count_nans_per_row",
        _COUNTS,
        "vllm.v1.worker.gpu_model_runner",
        instead="V2 counts in `get_num_nans`",
    ),
    Patched(f"{_GPU}sample.sampler:get_num_nans", _COUNTS, f"{_GPU}sample.sampler", instead=_NAN_V2),
    Patched(
        f"{_GPU}spec_decode.rejection_sampler:get_num_nans",
        _COUNTS,
        f"{_GPU}spec_decode.rejection_sampler",
        instead=_NAN_V2,
    ),
    Patched(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        _PROMPTS,
        "vllm.v1.worker.gpu_model_runner",
        instead="V2 computes them in `PromptLogprobsWorker`",
    ),
    Patched(
        f"{_GPU}sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",
        _PROMPTS,
        f"{_GPU}model_runner",
        instead="V1 computes them in the runner",
    ),
    Patched(
        f"{_GPU}sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_token_id_logprobs",
        _PROMPTS,
        f"{_GPU}model_runner",
        instead="V1 does not compute them",
    ),
    *(
        Patched(f"{_GPU}{symbol}", (_STATE, code), instead="V1 repeats adapters by row itself")
        for symbol, code in (
            ("lora_utils:LoraState.__init__", "_init_lora_state"),
            ("lora_utils:LoraState.make_lora_inputs", "_make_lora_inputs"),
            ("model_runner:GPUModelRunner.prepare_inputs", "_prepare_inputs"),
        )
    ),
    Patched(
        "vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.forward",
        (_STATE, "_forward"),
    ),
    *(
        Patched(f"vllm.lora.model_manager:LoRAModelManager.{symbol}", (_STATE, symbol))
        for symbol in ("_init_punica_wrapper", "_get_punica_wrapper")
    ),
    Patched("vllm.platforms:Platform.get_punica_wrapper", (_PUNICA, "use_wrapper.<locals>.<lambda>")),
    Patched(
        "vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping", (_PUNICA, "_set_mapping")
    ),
    Patched(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.update_metadata",
        ("kernels/punica_cpu.py", "CompiledPunicaWrapperCPU.update_metadata"),
        by=_CPU,
        instead="vLLM's kernels, or `PunicaWrapperGPU` with `LORA_PLUGINS_KERNELS=triton`",
    ),
    Patched(
        "vllm.utils.gc_utils:freeze_gc_heap",
        ("worker/manager.py", "_freeze_heap"),
        by=_CPU,
        instead="vLLM's GPU worker freezes its heap itself",
    ),
)  # fmt: skip
# Called where no model runner is, or by settings that the run below has not.
ELSEWHERE = {
    (_PUNICA, "_compute_hash"),  # with torch.compile: tests/vllm_patches/worker
    (_PUNICA, "_activate_adapter"),  # without lora_lru_manager
    # With audios or images: tests/vllm_patches/worker/test_adapter_rows.py.
    (_STATE, "_set_active_mm_loras"),
}


def calls_of(runner: str, home: Path) -> set[tuple[str, str, str]]:
    """Our functions that an engine with this model runner has called, and the modules that called them."""
    bed, is_v2 = prepare(), runner == "V2"
    base, draft = drafts.draft_model(bed.base, home / "draft")
    environment = {**(v2_runner.ENVIRONMENT if is_v2 else {}), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    asked = [(one.name, str(bed.adapters / one.name)) for one in DEMO_ADAPTERS]
    question = json.dumps([str(base), {**draft, "num_speculative_tokens": 2}, is_v2, [*asked, ("", None)]])
    said, _ = ran("offline_reached", question, home, **environment)
    assert said["runner"] == f"{RUNNERS[runner]}.CPUModelRunner"
    return {(file, name, caller) for file, name, caller in said["called"]}


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_patch_is_called_where_the_page_says(runner: str, tmp_path: Path) -> None:
    calls = calls_of(runner, tmp_path)
    reached = {
        one.symbol
        for one in PATCHES
        if any((file, name) == one.code and one.called_in in ("", caller) for file, name, caller in calls)
    }
    assert reached == {one.symbol for one in PATCHES if f"{runner}, CPU" in one.reached}


def test_no_patch_of_workers_is_left_out() -> None:
    """A patch that some runner never calls must say what stands in its place."""
    wrappers = {
        (file.relative_to(PACKAGE).as_posix(), function.name)
        for file in (PACKAGE / "vllm_patches" / "worker").glob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef) and [one.arg for one in function.args.args][:1] == ["original"]
    }
    assert wrappers - {one.code for one in PATCHES} == ELSEWHERE
    for one in PATCHES:
        assert bool(one.instead) == (one.reached != RUNS), one.symbol


def test_the_page_has_the_table() -> None:
    _, mark, after = PAGE.read_text().partition(MARK)
    assert mark
    assert after.lstrip("\n").partition("\n\n")[0] == table()


def table() -> str:
    lines = ["| vLLM's | called by | elsewhere |", "|---|---|---|"]
    for one in PATCHES:
        if one.reached == RUNS:
            continue
        module, _, name = one.symbol.partition(":")
        lines.append(f"| `{module.removeprefix('vllm.')}` `{name}` | {CALLED_BY[one.reached]} | {one.instead} |")
    return "\n".join(lines)
