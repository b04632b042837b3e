"""The trainer of examples/rl_loop.py, run as a reader would run it, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import OneSlot
from tests.e2e.standing_still import LONGEST_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def test_the_example_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.timeout(600)
def test_each_step_is_served_before_its_rollouts(one_slot: OneSlot) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(one_slot.bed.base), str(one_slot.home / "adapters"), "policy", "3"],
        env={**os.environ, "LORA_PLUGINS_URL": one_slot.server.url, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d): digest (\w{12}), swapped (\w+), mean reward", done.stdout, re.MULTILINE)
    assert [(number, swapped) for number, _, swapped in steps] == [("0", "False"), ("1", "True"), ("2", "True")]
    digests = [digest for _, digest, _ in steps]
    assert len(set(digests)) == 3
    with httpx.Client(base_url=one_slot.server.url, timeout=LONGEST_S) as client:
        served = client.get("/v1/loras/policy").json()
    assert served["digest"].startswith(digests[-1])
    assert served["state"] == "serving"
