"""Our Triton wrapper under the real engine, in Triton's interpreter: every row of mixed batches is PEFT's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from lora_plugins.kernels import tuning
from testbed import v2_runner
from testbed.bed import Bed
from testbed.forking_vllm import run_forked
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.reference import Reference
from testbed.server import outer_environment
from testbed.vectors import with_biases, with_magnitudes
from tests.e2e.servers import ENVIRONMENT
from tests.repetitions import times

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
pytestmark = pytest.mark.slow

NAMES = [spec.name for spec in DEMO_ADAPTERS]
TOKENS = times(4, short=2)  # the interpreter takes its time
BATCHES = [
    [None, *NAMES[:3], None, NAMES[0]],  # mixed ranks and base rows
    [None, None],
    *[[name] for name in ("wide", "team/poet", "stable")],  # slots reused by other ranks, one of them in fewer modules
    ["team/poet", None, "wide"],
]
PLANS = {
    # As large as the model, so that few programs run.
    "shrink and expand": tuning.Plan(
        16, tuning.ShrinkTile(64, 512, 1, 1), tuning.ExpandTile(64, 512), max_rows=tuning.ANY
    ),
    "fused": tuning.Plan(
        16, tuning.ShrinkTile(), tuning.ExpandTile(), tuning.FusedTile(64, 512, 512), max_rows=tuning.ANY
    ),
}


EACH_PATH = pytest.mark.parametrize("path", ["shrink and expand", pytest.param("fused", marks=pytest.mark.nightly)])


@EACH_PATH
def test_every_row_of_mixed_batches_is_pefts(path: str, bed: Bed, tmp_path: Path) -> None:
    answers = asked(path, bed, bed.adapters, BATCHES, tmp_path, VLLM_PLUGINS="")
    assert answers == [[bed.answers[name][:TOKENS] for name in batch] for batch in BATCHES]


@EACH_PATH
def test_rows_with_vectors_are_pefts_beside_plain_ones(path: str, bed: Bed, tmp_path: Path) -> None:
    """With two slots, which change hands between adapters with vectors and without."""
    root, reference, expected = tmp_path / "adapters", Reference(bed.base), dict(bed.answers)
    shutil.copytree(bed.adapters, root)
    with_magnitudes(root / "sql", root / "dora", bed.base)
    with_biases(root / "chat", root / "biases")
    for name, plain in (("dora", "sql"), ("biases", "chat")):
        expected[name] = reference.generate(root / name, reference.prompt_ids(PROMPT), TOKENS)
        assert expected[name] != bed.answers[plain][:TOKENS]
    batches = [["dora", None, "sql", "dora"], ["chat", "biases"], ["dora"], ["stable", "dora"], ["sql", "biases", None]]
    answers = asked(
        path, bed, root, batches, tmp_path,
        max_loras=2, VLLM_PLUGINS="lora_lru_manager", LORA_PLUGINS_STORE_DIR=str(tmp_path / "store"),
    )  # fmt: skip
    assert answers == [[expected[name][:TOKENS] for name in batch] for batch in batches]


def asked(
    path: str,
    bed: Bed,
    adapters: Path,
    batches: Sequence[Sequence[str | None]],
    tmp_path: Path,
    *,
    max_loras: int = 3,
    **environment: str,
) -> list[list[list[int]]]:
    """The engine's answers, computed by one of `PLANS`."""
    table = tuning.Table("", (PLANS[path],), dense_min_rows=7 if path == "fused" else None)
    (tmp_path / "cpu.json").write_text(json.dumps(tuning.as_json(table)))
    question = {
        "base": str(bed.base),
        "adapters": str(adapters),
        "tables": str(tmp_path),
        "settings": {
            "dtype": "float32",
            "max_lora_rank": 64,
            "max_loras": max_loras,
            "max_cpu_loras": 5,
            "max_model_len": 64,
            "max_num_batched_tokens": 16,  # warm-up runs as many, in the interpreter; prompts come in parts
            "max_num_seqs": 8,
        },
        "max_tokens": TOKENS,
        "batches": batches,
    }
    done = run_forked(
        "testbed.interpreted_engine:main",
        ["interpreted_engine", json.dumps(question)],
        home=tmp_path,
        environment={
            **outer_environment(),
            **ENVIRONMENT,
            **v2_runner.INTERPRETED,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"Triton kernels cut their work by {tmp_path / 'cpu.json'}" in done.stderr
    return list(json.loads(done.stdout))
