"""What fails in `make test` runs once more: what passes then is printed and kept, what fails again fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.once_more import MOST

ROOT = Path(__file__).resolve().parent.parent
FLAKY = """
def test_first_fails(tmp_path_factory):
    from pathlib import Path
    mark = Path(__file__).with_suffix(".mark")
    is_first = not mark.exists()
    mark.touch()
    assert not is_first, "the first time"
"""


def run(folder: Path, **files: str) -> tuple[int, str, list[dict[str, object]]]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "tests.once_more", "-n", "1", "."]
    # Other packages' plugins take seconds of a core to import.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    kept = folder / "benchmarks" / "results" / "flaky.json"
    return done.returncode, done.stdout, json.loads(kept.read_text()) if kept.exists() else []


def test_what_passes_alone_is_flaky_and_no_failure(tmp_path: Path) -> None:
    code, out, kept = run(tmp_path, flaky=FLAKY, good="def test_good(): pass\n")
    assert (code, "FLAKY test_flaky.py::test_first_fails" in out) == (0, True), out
    (entry,) = kept
    assert entry["test"] == "test_flaky.py::test_first_fails"
    assert "the first time" in str(entry["output"])


def test_what_fails_again_fails(tmp_path: Path) -> None:
    bad = "def test_bad(): assert False\ndef test_not_set_up(no_such_fixture): pass\n"
    code, out, kept = run(tmp_path, flaky=FLAKY, bad=bad)
    assert code == 1, out
    assert [entry["test"] for entry in kept] == ["test_flaky.py::test_first_fails"]


def test_many_failures_are_no_chance(tmp_path: Path) -> None:
    many = f"import pytest\n@pytest.mark.parametrize('n', range({MOST}))\ndef test_bad(n): assert False\n"
    code, out, kept = run(tmp_path, flaky=FLAKY, many=many)
    assert (code, "FLAKY" in out, kept) == (1, False, [])
