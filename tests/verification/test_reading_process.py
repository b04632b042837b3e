"""A process that reads: it is replaced when it ends, and ends with its parent."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lora_plugins.adapter.layouts.tensors import NewTensor, Part
from lora_plugins.adapter.layouts.writing import tensors_of
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.verification import process_limits
from lora_plugins.verification.children import Children
from lora_plugins.verification.process_limits import wall_s
from tests.make import BASE, put
from tests.store.common import is_soon
from tests.verification.conftest import NAMED, program, read, reading_is, written


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def test_a_process_that_was_killed_is_replaced(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    (before,) = children.pids()
    os.kill(before, signal.SIGKILL)
    assert read(children, adapter)
    assert before not in children.pids()


def test_a_process_that_was_stopped_is_replaced(children: Children, adapter: Path) -> None:
    """It would answer when somebody continues it, and until then keep everybody waiting."""
    assert read(children, adapter)
    (before,) = children.pids()
    stop(before)
    reading = children.read(adapter, Settings())
    assert reading.result(wall_s(str(adapter)) / 2)
    assert before not in children.pids()
    assert not psutil.pid_exists(before)


def test_a_server_without_open_files_says_so(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    most, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, most[1]))
    try:
        with suppress(OSError):  # until none is left
            while True:
                held.append(os.dup(0))
        with pytest.raises(SourceUnavailable, match=r"Too many open files.*limits of processes, open files"):
            children.read(adapter, Settings()).result()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        for one in held:
            os.close(one)
    assert read(children, adapter)


def test_a_stopped_process_holds_up_no_large_request(children: Children, adapter: Path, tmp_path: Path) -> None:
    """A pipe takes 64 KiB: the rest of a request waits for a reader."""
    source = read(children, adapter).adapter.weights.pairs[0].a
    many = [NewTensor(replace(source, name=f"{number:01000}"), (source,), Part()) for number in range(500)]
    (before,) = children.pids()
    stop(before)
    children.write(many, adapter, tmp_path / "made", lambda _: None).result(wall_s(str(adapter)) / 2)
    assert (tmp_path / "made").stat().st_size > 500_000
    assert not psutil.pid_exists(before)


KILLED = (SourceUnavailable, "process is killed or fails, each time")
ENDED = (InvalidAdapter, "ends the process that reads it, each time")


@pytest.mark.parametrize(
    ("end", "refusal"),
    [
        ("os.abort()", ENDED),
        ("ctypes.string_at(0)", ENDED),
        ("os._exit(3)", ENDED),
        # As the OOM killer does it, an administrator, or a disk that fails below a file in memory.
        ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
        ("os.kill(os.getpid(), signal.SIGBUS)", KILLED),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", KILLED, marks=pytest.mark.nightly),
        pytest.param("os.kill(os.getpid(), signal.SIGUSR1)", KILLED, marks=pytest.mark.nightly),
    ],
)
def test_only_what_crashes_each_process_is_the_adapters_fault(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch, end: str, refusal: tuple[type[Exception], str]
) -> None:
    reading_is(monkeypatch, end)
    before = set(psutil.Process().children())
    with pytest.raises(refusal[0], match=refusal[1]):
        read(children, adapter)
    assert set(psutil.Process().children()) <= before


CRASH_WHERE_ASKED = """
import os, signal
from lora_plugins.verification import child
verify = child.verify_adapter
def crashed(directory, *more):
    path = os.path.join(directory, "crashes")
    left = os.path.exists(path) and open(path).read().split()
    if left:
        open(path, "w").write(" ".join(left[1:]))
        os.kill(os.getpid(), getattr(signal, left[0]))
    return verify(directory, *more)
child.verify_adapter = crashed
"""


@pytest.mark.parametrize("ends", ["SIGILL", "SIGABRT SIGSEGV", "SIGKILL SIGSEGV"])
def test_a_crash_that_does_not_repeat_says_nothing(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """As by a watchdog, a faulty memory module, or a thread that could not start at that moment."""
    program(monkeypatch, CRASH_WHERE_ASKED)
    (adapter / "crashes").write_text(ends)
    assert read(children, adapter).adapter.config.max_rank == 4
    assert (adapter / "crashes").read_text() == ""


def test_crashes_beside_a_kill_are_a_fault(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the OOM killer is at work, an allocation that fails may be what has ended the others."""
    program(monkeypatch, CRASH_WHERE_ASKED)
    (adapter / "crashes").write_text("SIGKILL SIGABRT SIGSEGV")
    with pytest.raises(SourceUnavailable, match="is killed"):
        read(children, adapter)
    assert read(children, adapter)


def test_crashes_without_memory_to_spare_are_a_fault(
    children: Children, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_is(monkeypatch, "os.abort()")
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n")
    monkeypatch.setattr(process_limits, "_MEMORY", memory)
    with pytest.raises(SourceUnavailable, match="900000 kB of memory on this machine"):
        read(children, adapter)


def test_an_exception_of_our_own_is_no_broken_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a limit of the process is lowered while it runs: the bytes have not been looked at."""
    with monkeypatch.context() as meanwhile:
        first = "from lora_plugins.verification import child\ndef fail(*_): raise OSError(24, 'Too many open files')"
        program(meanwhile, f"{first}\nchild._set_limits = fail")
        with pytest.raises(SourceUnavailable, match="is killed or fails, each time, by code 1"):
            read(children, adapter)
    assert read(children, adapter)


def test_no_process_is_no_fault_of_the_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, "import sys; sys.exit(5)")
    with pytest.raises(SourceUnavailable, match="ended with 5"):
        read(children, adapter)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SourceUnavailable, match="no process that reads adapters"):
        read(children, adapter)


def test_a_user_without_a_passwd_entry_is_no_broken_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, "import pwd\ndef none(*_): raise KeyError('none')\npwd.getpwuid = pwd.getpwnam = none")
    assert read(children, adapter).adapter.config.max_rank == 4


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, adapter: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lora_plugins.settings import Settings\n"
        "from lora_plugins.verification.children import children\n"
        "made = children(); made.read(Path(sys.argv[1]), Settings()).result()\n"
        "print(*made.pids(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(adapter)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert is_soon(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_report_that_fails_leaves_no_answer_behind(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, "from lora_plugins.verification import child; child._LANDED_BYTES = 1")
    directory = put(tmp_path / "sql", NAMED)
    conversion = verify_adapter(directory, BASE, Settings()).conversion
    assert conversion is not None
    writing = children.write(tensors_of(conversion), directory, tmp_path / "made", lambda size: size // 0)
    with pytest.raises(ZeroDivisionError):
        writing.result(60)
    assert children.pids() == []
    assert read(children, directory)


def test_a_full_disk_stays_an_error_of_the_disk(children: Children, tmp_path: Path) -> None:
    directory = put(tmp_path / "sql", NAMED)
    with pytest.raises(FileNotFoundError):
        written(children, directory, tmp_path / "no" / "folder")
    with pytest.raises(OSError, match="No space left") as caught:
        written(children, directory, Path("/dev/full"))
    assert caught.value.errno == errno.ENOSPC
    assert read(children, directory)
