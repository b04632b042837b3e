"""The one way to start the programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import SECONDS, main, parser

ROOT = Path(__file__).parents[3]


def test_all_calls_fit_the_device_time_of_a_session() -> None:
    on_the_device = [SECONDS[name] for name in ("check", "streams", "tune", "time")]
    starts_s = 3 * 60
    assert sum(on_the_device) + starts_s <= 30 * 60
    assert all(seconds <= 9 * 60 for seconds in on_the_device)


def test_documented_commands_are_those_there_are() -> None:
    page = (ROOT / "docs" / "explanation" / "kernels-gpu.md").read_text()
    for program in (*SECONDS, "prepare SOURCES"):
        assert f"-m benchmarks.gpu {program}" in " ".join(page.split())
    assert '".cache/gpu"' in page


@pytest.mark.parametrize("program", ["", *SECONDS, "prepare"])
def test_each_program_has_its_help(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*program.split(), "--help"])
    assert ended.value.code == 0
    assert program in capsys.readouterr().out


def test_results_go_where_the_device_machine_collects_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert parser().parse_args(["check"]).out == tmp_path


def test_without_a_gpu_the_programs_refuse(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "streams", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no GPU here" in done.stderr
    assert not list(tmp_path.iterdir())
