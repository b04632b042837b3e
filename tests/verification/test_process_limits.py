"""How much an adapter may take to be read, and how long."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import psutil
import pytest

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.verification import process_limits, reading_process
from lora_plugins.verification.children import Children
from tests.make import adapter_files, put
from tests.other_processes import other_processes
from tests.verification.conftest import HOLD, NAMED, program, read, reading_is, written


def test_computing_too_long_is_refused(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading_is(monkeypatch, "sum(itertools.count())\nchild.cpu_s = lambda _: 0")
    with pytest.raises(InvalidAdapter, match="takes too long to read"):
        read(children, adapter)
    assert children.pids() == []


def test_waiting_too_long_is_no_fault_of_the_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_is(monkeypatch, HOLD)
    before = set(psutil.Process().children())
    monkeypatch.setattr(reading_process, "wall_s", lambda _: 0.3)
    with pytest.raises(SourceUnavailable, match="no answer within 0 s"):
        read(children, adapter)
    assert set(psutil.Process().children()) <= before


FORKS = """
import os, time
from lora_plugins.verification import child
def fork(directory, *_):
    if pid := os.fork():
        (directory / "pid").write_text(str(pid))
    time.sleep(600)
child.verify_adapter = fork
"""


def test_a_process_that_forks_is_waited_for_no_longer(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile bytes may have it fork: its end is not the end of its connection then."""
    program(monkeypatch, FORKS)
    monkeypatch.setattr(reading_process, "wall_s", lambda _: 1.0)
    reading = children.read(adapter, Settings())
    try:
        with pytest.raises(SourceUnavailable, match="no answer within 1 s"):
            reading.result(30)
    finally:
        psutil.Process(int((adapter / "pid").read_text())).kill()


def test_too_much_memory_is_refused(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern that took 8.5 GB in the server, with the count of repeats off."""
    program(monkeypatch, "from lora_plugins.adapter import patterns; patterns.MAX_REPEATS = 1 << 62")
    hostile = put(tmp_path / "bad", adapter_files(rank_pattern={"(?:(?:(?:a+){1000}){1000}){1000}": 8}))
    with pytest.raises(InvalidAdapter, match="memory"):
        read(children, hostile)
    assert read(children, put(tmp_path / "sql", adapter_files()))


def test_the_memory_that_it_may_take_is_said(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_is(monkeypatch, "bytearray(1 << 32)")
    with pytest.raises(InvalidAdapter, match=f"more than {process_limits.MAX_MEMORY_BYTES >> 20} MiB of memory"):
        read(children, adapter)


def test_limits_of_the_process_are_set(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    (pid,) = children.pids()
    found = psutil.Process(pid)
    assert found.rlimit(psutil.RLIMIT_DATA)[0] == process_limits.MAX_MEMORY_BYTES
    assert found.rlimit(psutil.RLIMIT_NOFILE)[0] == process_limits.MAX_FILES
    assert 0 < found.rlimit(psutil.RLIMIT_CPU)[0] < 60
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != process_limits.MAX_MEMORY_BYTES


def limited(adapter: Path, limit: str, most: int, first: str = "", *, writes: bool = False) -> list[str]:
    """What a server under this limit answers, which reads an adapter three times, or writes the adapter."""
    with other_processes() as process:
        return process.submit(answers, adapter, getattr(resource, limit), most, first, writes).result(120)


def answers(adapter: Path, limit: int, most: int, first: str, writes: bool) -> list[str]:
    """As Slurm, LSF and containers start what they run: with hard limits, and without the right to raise them."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    for word in (0, 1):
        sets[word] &= ~(1 << 24)  # CAP_SYS_RESOURCE
    assert libc.capset(header, sets) == 0
    resource.setrlimit(limit, (most, most))
    with pytest.MonkeyPatch.context() as patched:
        program(patched, first)
        made = Children()
        try:
            if writes:
                return [str(size) for sizes in written(made, adapter, adapter / "out") for size in sizes]
            return [str(read(made, adapter).adapter.size_bytes) for _ in range(3)]
        except LoRAPluginsError as error:
            return [f"{type(error).__name__} {error}"]
        finally:
            made.end()


@pytest.mark.parametrize(
    ("limit", "most"), [("RLIMIT_CPU", 20), ("RLIMIT_CPU", 100_000), ("RLIMIT_DATA", 1 << 30), ("RLIMIT_NOFILE", 64)]
)
def test_adapters_are_read_under_a_clusters_limits(adapter: Path, limit: str, most: int) -> None:
    assert limited(adapter, limit, most) == [str(sum(file.stat().st_size for file in adapter.iterdir()))] * 3


HELD = """
from contextlib import ExitStack
from lora_plugins.adapter.files import open_regular
from lora_plugins.verification import child
child.verify_adapter = lambda directory, *_: """
PATTERN = (
    "[setattr(patterns := __import__('lora_plugins.adapter.patterns').adapter.patterns, 'MAX_REPEATS', 1 << 62), "
    "patterns.PatternBudget().matches('(?:(?:(?:a+){1000}){1000}){1000}', 'a', field='rank_pattern')]"
)
ENDS = "__import__('os').abort()"
DEEP = "repr(__import__('functools').reduce(lambda inner, _: [inner], range(900), []))"  # within Python's own limit
OPEN = "[every.enter_context(open_regular(directory / 'adapter_config.json')) for every in [ExitStack()] * 64]"


@pytest.mark.parametrize(
    ("limit", "most", "work"),
    [
        ("RLIMIT_CPU", 2, "sum(iter(int, 1))"),
        ("RLIMIT_DATA", 1 << 29, "bytearray(1 << 30)"),
        ("RLIMIT_AS", 1 << 31, "bytearray(1 << 31)"),
        ("RLIMIT_NOFILE", 64, OPEN),
        ("RLIMIT_DATA", 1 << 29, PATTERN),
        ("RLIMIT_DATA", 1 << 29, ENDS),
        ("RLIMIT_STACK", 1 << 17, DEEP),
    ],
)
def test_a_limit_that_is_too_low_is_named(adapter: Path, limit: str, most: int, work: str) -> None:
    (answer,) = limited(adapter, limit, most, HELD + work)
    assert answer.startswith("SourceUnavailable [L006]")
    assert limit in answer


def test_a_conversion_without_memory_names_the_limit(tmp_path: Path) -> None:
    first = "from lora_plugins.verification import child\nchild.write_weights = lambda *_: bytearray(1 << 30)"
    (answer,) = limited(put(tmp_path / "sql", NAMED), "RLIMIT_DATA", 1 << 29, first, writes=True)
    assert answer.startswith("SourceUnavailable [L006]")
    assert "RLIMIT_DATA" in answer


def test_a_conversion_that_takes_too_much_memory_is_refused(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        monkeypatch, "from lora_plugins.verification import child; child.write_weights = lambda *_: bytearray(1 << 33)"
    )
    with pytest.raises(InvalidAdapter, match="MiB of memory"):
        children.write((), tmp_path, tmp_path / "out", lambda _: None).result(120)
    assert children.pids(), "it goes on"
