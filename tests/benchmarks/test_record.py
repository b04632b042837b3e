"""What a result says of where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record


def test_the_carried_commit_says_whether_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu" / "commit.json"
    assert record.carried_commit(path) == "unknown"
    record.carry_commit(path)
    known = record.commit() or "unknown"
    assert record.carried_commit(path) == known
    path.write_text(json.dumps({**json.loads(path.read_text()), "sources": "others"}))
    assert record.carried_commit(path) == f"{known}, and sources changed since"


def test_circumstances_need_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(record, "CARRIED_COMMIT", Path("/nonexistent"))
    monkeypatch.setattr(record, "carried_commit", lambda: "abc, carried")
    assert record.commit() is None
    assert record.circumstances()["commit"] == "abc, carried"
