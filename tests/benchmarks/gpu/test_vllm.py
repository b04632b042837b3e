"""vLLM's operators where vLLM is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.vllm import Vllm

ROOT = Path(__file__).parents[3]


def test_programs_import_without_vllm_and_say_what_lacks(tmp_path: Path) -> None:
    """The machine with the GPU has torch and Triton, and little else."""
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from benchmarks.gpu import check, operators, streams, tune, vllm, weights\n"
        "from pathlib import Path\n"
        "vllm.load(rehearse=False, carried=Path(sys.argv[1]))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "vLLM's operators cannot be imported: ModuleNotFoundError" in done.stderr
    assert "benchmarks.gpu prepare" in done.stderr


def test_specialized_counts_are_vllms() -> None:
    from vllm.lora.utils import get_captured_lora_counts

    for slots in (1, 7, 8, 64, 128):
        assert Vllm.captured_counts(slots) == get_captured_lora_counts(slots, specialize=True)
