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

from tests.make import adapter_files

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "examples" / "ci"

pytestmark = pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


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
    write(tmp_path / "adapters" / "team" / "sql", adapter_files(base_model_name_or_path="acme/base-8b"))
    done = checked()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "adapters/team/sql: ok\n1 adapters, 0 refused\n"


@pytest.mark.parametrize(
    ("files", "env", "said"),
    [
        (
            {"adapter_model.safetensors": b"cut"},
            {},
            "[L005] adapter 'adapters/bad', file 'adapter_model.safetensors': found ",
        ),
        ({}, {"MAX_LORA_RANK": "2"}, "has rank 4, the server takes 2"),
        ({}, {"BASE_MODEL": "acme/other"}, "is for acme/base-8b, not for acme/other"),
    ],
)
def test_what_a_server_would_refuse_fails(tmp_path, checked, files, env, said):
    write(tmp_path / "adapters" / "bad", adapter_files(base_model_name_or_path="acme/base-8b") | files)
    write(tmp_path / "adapters" / "good", adapter_files(base_model_name_or_path=env.get("BASE_MODEL", "acme/base-8b")))
    done = checked(**env)
    assert done.returncode == 1
    assert f"adapters/bad: {said}" in done.stdout
    assert ("adapters/good: ok" in done.stdout) == ("MAX_LORA_RANK" not in env)


def test_nothing_to_look_at_fails(checked):
    done = checked()
    assert (done.returncode, done.stdout) == (1, "0 adapters, 0 refused\n")
