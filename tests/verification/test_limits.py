"""How much an adapter may take to be read, and how long."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.verification import limits, process
from lora_plugins.verification.children import Children
from tests.make import adapter_files, put
from tests.verification.conftest import HOLD, program, read


def test_computing_too_long_is_refused(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "from lora_plugins.verification import child; child.cpu_s = lambda _: 0\n"
    program(monkeypatch, endless + "import itertools; child.verify_adapter = lambda *_: sum(itertools.count())")
    with pytest.raises(InvalidAdapter, match="takes too long to read"):
        read(children, adapter)
    assert children.pids() == []


def test_waiting_too_long_is_no_fault_of_the_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, HOLD)
    before = set(psutil.Process().children())
    monkeypatch.setattr(process, "wall_s", lambda _: 0.3)
    with pytest.raises(SourceUnavailable, match="no answer within 0 s"):
        read(children, adapter)
    assert set(psutil.Process().children()) <= before


def test_too_much_memory_is_refused(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern that took 8.5 GB in the server, with the count of repeats off."""
    program(monkeypatch, "from lora_plugins.adapter import patterns; patterns.MAX_REPEATS = 1 << 62")
    hostile = put(tmp_path / "bad", adapter_files(rank_pattern={"(?:(?:(?:a+){1000}){1000}){1000}": 8}))
    with pytest.raises(InvalidAdapter, match="memory"):
        read(children, hostile)
    assert read(children, put(tmp_path / "sql", adapter_files()))


def test_limits_of_the_process_are_set(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    (pid,) = children.pids()
    found = psutil.Process(pid)
    assert found.rlimit(psutil.RLIMIT_DATA)[0] == limits.MAX_MEMORY_BYTES
    assert found.rlimit(psutil.RLIMIT_NOFILE)[0] == limits.MAX_FILES
    assert 0 < found.rlimit(psutil.RLIMIT_CPU)[0] < 60
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != limits.MAX_MEMORY_BYTES
