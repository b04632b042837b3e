"""A program's result, whole at every moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import session as session_module

ROOT = Path(__file__).parents[3]


def test_a_result_is_whole_after_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "EVERY_S", 0.0)
    result = session_module.Result(tmp_path, "part", {"gpu": "one"}, rehearsal=False)
    for number in range(3):
        result.add({"row": number})
        found = json.loads((tmp_path / "part.json").read_text())
        assert (found["complete"], found["gpu"], len(found["rows"])) == (False, "one", number + 1)
        assert "rehearsal: not measured" not in found
    result.finish(goals=[])
    assert json.loads((tmp_path / "part.json").read_text())["complete"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["part.json"]


def test_a_rehearsal_says_so_in_name_and_content(tmp_path: Path) -> None:
    result = session_module.Result(tmp_path, "part", {}, rehearsal=True)
    assert result.path.name == "rehearsal_part.json"
    assert json.loads(result.path.read_text())["rehearsal: not measured"] is True


CUT_OFF = """
import sys, time
from pathlib import Path
from benchmarks.gpu import session
session.EVERY_S = 0.0
result = session.Result(Path(sys.argv[1]), "slow", {}, rehearsal=False)
for number in range(1000):
    result.add({"row": number})
    time.sleep(0.02)
"""


def test_a_program_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path)], cwd=ROOT, timeout=8.0, check=False)
    found = json.loads((tmp_path / "slow.json").read_text())
    assert found["complete"] is False
    assert [row["row"] for row in found["rows"]] == list(range(len(found["rows"])))
    assert found["rows"]
