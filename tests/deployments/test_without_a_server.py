"""`LLM` and `AsyncLLM`: more adapters in one batch than the host budget has room for, and one larger than all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.forking_vllm import run_forked
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import outer_environment
from tests.e2e.servers import ENVIRONMENT

NAMES = [spec.name for spec in DEMO_ADAPTERS]
OVER = "wide"  # 2.1 MB
FITTING = [name for name in NAMES if name != OVER]  # the largest has 0.53 MB, all together 1.05
HOST_MAX_BYTES = 600_000

pytestmark = pytest.mark.nightly


def run(bed: Bed, home: Path, program: str, **environment: str) -> dict[str, Any]:
    asked = [*((name, str(bed.adapters / name)) for name in NAMES), ("", None)]
    arguments = json.dumps([str(bed.base), PROMPT, MAX_TOKENS, asked])
    everything = {
        **outer_environment(),
        **ENVIRONMENT,
        "VLLM_PLUGINS": "lora_lru_manager,lora_kernels",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LORA_PLUGINS_HOST_MAX_BYTES": str(HOST_MAX_BYTES),
        **environment,
    }
    done = run_forked(f"{program}:main", ["offline", arguments], home=home, environment=everything)
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"outputs"')))
    return said


@pytest.mark.deployment(
    "offline LLM", "tested", "more adapters in a batch than fit; one larger than the budget is an error of its own"
)
@pytest.mark.parametrize("processes", ["1", "0"], ids=["engine in a process", "engine in this process"])
def test_llm_answers_all_that_fit_the_budget(bed: Bed, tmp_path: Path, processes: str) -> None:
    said = run(bed, tmp_path, "testbed.offline", VLLM_ENABLE_V1_MULTIPROCESSING=processes)
    answers = dict(zip([*NAMES, None], said["outputs"], strict=True))
    reason, text, ids = answers.pop(OVER)
    assert (reason, ids) == ("error", [])
    assert text.startswith("[L004]")
    assert str(HOST_MAX_BYTES) in text or "0.6 MB" in text
    assert {name: ids for name, (_, _, ids) in answers.items()} == {name: bed.answers[name] for name in answers}
    assert (said["loaded"], said["listed"]) == (True, True), "the engine lives"


@pytest.mark.deployment(
    "AsyncLLM", "tested", "more adapters at once than fit; one larger than the budget is an error of its own"
)
def test_async_llm_answers_all_that_fit_the_budget(bed: Bed, tmp_path: Path) -> None:
    said = run(bed, tmp_path, "testbed.offline_async")
    for part in ("outputs", "again"):
        answers = dict(zip([*NAMES, None], said[part], strict=True))
        status, text = answers.pop(OVER)
        assert status == 507
        assert "[L004]" in text
        assert answers == {name: bed.answers[name] for name in answers}, part
