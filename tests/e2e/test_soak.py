"""A soak whose world is broken on purpose must fail; one that is not broken is `make soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("control", "invariant"),
    [
        ("wrong-version", "every answer is right"),
        ("leak", "nothing is left at the end"),
        ("long-memory", "that nothing explains"),
        ("lost-lease", "what is served is leased"),
        ("stuck-breaker", "a fault passes"),
    ],
)
def test_a_soak_of_a_broken_world_fails(control: str, invariant: str) -> None:
    command = [sys.executable, "-m", "soak", "--seconds", "40", "--seed", "1", "--control", control]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert invariant in ended.stdout
