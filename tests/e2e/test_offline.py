"""`LLM`, without a server: a broken or missing adapter fails in isolation, and a small budget only takes time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.forking_vllm import run_forked
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.server import outer_environment
from tests.e2e.broken import BROKEN
from tests.e2e.servers import ENVIRONMENT

NAMES = [spec.name for spec in DEMO_ADAPTERS]
HOST_MAX_BYTES = 5_200_000  # "wide" takes 4.3 MB of it, the others less than 0.6: not all five fit


@pytest.mark.parametrize("processes", [1, 0], ids=["engine in a process", "engine in this process"])
def test_broken_adapters_fail_in_isolation_and_others_are_answered(bed: Bed, tmp_path: Path, processes: int) -> None:
    shutil.copytree(bed.adapters / "sql", tmp_path / "truncated")
    next(case for case in BROKEN if case.name == "truncated").make(tmp_path / "truncated")
    adapters = [(name, str(bed.adapters / name)) for name in NAMES]
    asked = [*adapters, ("truncated", str(tmp_path / "truncated")), ("nowhere", str(tmp_path / "no")), ("", None)]
    environment = {
        **outer_environment(),
        **ENVIRONMENT,
        "VLLM_PLUGINS": "lora_lru_manager,lora_kernels",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(processes),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LORA_PLUGINS_HOST_MAX_BYTES": str(HOST_MAX_BYTES),
    }
    arguments = json.dumps([str(bed.base), PROMPT, MAX_TOKENS, asked])
    run = run_forked("testbed.offline:main", ["offline", arguments], home=tmp_path, environment=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    said = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"outputs"')))
    answers = {name: output for (name, _), output in zip(asked, said["outputs"], strict=True)}
    for name in NAMES:
        assert answers[name] == ["length", "None", bed.answers[name]], name
    assert answers[""][2] == bed.answers[None]
    for name, code in (("truncated", "[L005]"), ("nowhere", "[L002]")):
        reason, text, ids = answers[name]
        assert (reason, ids) == ("error", []), name
        assert text.startswith(code), text
        assert name in text
    assert (said["loaded"], said["listed"]) == (True, True)
