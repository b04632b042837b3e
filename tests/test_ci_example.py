"""examples/ci: the script that a workflow of GitHub Actions runs, run as the workflow says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.make import adapter_files, put, weights

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "examples" / "ci"

pytestmark = pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")


@pytest.fixture
def checked(tmp_path):
    """Runs the last step of the workflow in a repository of adapters."""
    step = yaml.safe_load((CI / "adapters.yml").read_text())["jobs"]["inspect"]["steps"][-1]
    shutil.copy(CI / "check_adapters.sh", tmp_path)
    (tmp_path / "adapters").mkdir()

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **step["env"], **env}
        return subprocess.run(
            shlex.split(step["run"]), cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return run


def test_good_adapters_pass(tmp_path, checked):
    put(tmp_path / "adapters" / "team" / "sql", adapter_files(base_model_name_or_path="acme/base-8b"))
    done = checked()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "adapters/team/sql: ok\n1 adapters, 0 refused\n"


def test_what_a_server_would_refuse_fails(tmp_path, checked):
    for_base = {"base_model_name_or_path": "acme/base-8b"}
    small = adapter_files(weights(2), r=2, **for_base)
    adapters = {
        "cut": small | {"adapter_model.safetensors": b"cut"},
        "good": small,
        "other": adapter_files(weights(2), r=2, base_model_name_or_path="acme/other"),
        "wide": adapter_files(**for_base),
    }
    for name, files in adapters.items():
        put(tmp_path / "adapters" / name, files)
    done = checked(MAX_LORA_RANK="2")
    assert done.returncode == 1
    for said in (
        "cut: [L005] adapter 'adapters/cut', file 'adapter_model.safetensors': found ",
        "good: ok\n",
        "other: is for acme/other, not for acme/base-8b",
        "wide: has rank 4, the server takes 2",
    ):
        assert f"adapters/{said}" in done.stdout


def test_nothing_to_look_at_fails(checked):
    done = checked()
    assert (done.returncode, done.stdout) == (1, "0 adapters, 0 refused\n")
