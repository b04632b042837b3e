"""Who is alive: by the kernel on this host, by the file system's clock on others."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lora_plugins.store.layout import Layout
from lora_plugins.store.leases import Leases
from lora_plugins.store.processes import Processes, _host, _start_of
from tests.store.common import is_soon


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "processes").mkdir()
    return tmp_path / "processes"


@pytest.fixture
def processes(folder: Path) -> Processes:
    return Processes(folder)


def test_this_process_is_alive_and_has_a_heartbeat(processes, folder):
    me = processes.me()
    assert os.listdir(folder) == [me]
    assert processes.is_alive(me)
    assert me == processes.me() == f"{_host()}.{os.getpid()}.{_start_of(os.getpid())}"


def test_another_process_is_alive_until_it_ends(processes):
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        name = f"{_host()}.{child.pid}.{_start_of(child.pid)}"
        assert processes.is_alive(name)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.is_alive(name)  # dead, though nobody has waited for it yet
        child.wait()
        assert not processes.is_alive(name)


def test_a_number_that_was_used_again_is_another_process(processes):
    host, pid, start = processes.me().split(".")
    assert not processes.is_alive(f"{host}.{pid}.{int(start) + 1}")


def test_on_this_host_a_heartbeat_keeps_nobody_alive(processes, folder):
    name = f"{_host()}.999999999.5"
    (folder / name).touch()
    assert not processes.is_alive(name)


@pytest.mark.parametrize(("silent_s", "alive"), [(0, True), (59, True), (61, False), (86_400, False)])
def test_another_host_is_alive_by_its_heartbeat(processes, folder, monkeypatch, silent_s, alive):
    name = "otherhost.1.1"
    assert not processes.is_alive(name)
    (folder / name).touch()
    monkeypatch.setattr(processes, "_now", lambda: 100_000.0)  # what the file system's clock says
    os.utime(folder / name, (100_000.0 - silent_s,) * 2)
    assert processes.is_alive(name) is alive


def test_hosts_need_not_agree_on_the_time(processes, folder, monkeypatch):
    (folder / "otherhost.1.1").touch()
    for wrong in (0.0, 1e11):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert processes.is_alive("otherhost.1.1")


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "a", "a.b", "a.1", "a.1.", ".1.", "../x.1.1", "a/b.1.1", "a.x.1", "a.²3.1"],
        *[f"{host}.{rest}" for host in (_host(), "other") for rest in ("", ".", "999999999.", ".5", "1", "\0.\0")],
    ],
)
def test_what_is_no_name_is_not_alive(processes, name):
    processes.me()
    assert not processes.is_alive(name)


def test_the_heart_beats(folder):
    processes = Processes(folder, beat_s=0.02)
    beat = folder / processes.me()
    os.utime(beat, (1, 1))
    assert is_soon(lambda: beat.stat().st_mtime != 1)


def test_the_heart_stops_with_the_store_that_it_beats_for(tmp_path):
    """A program that opens many stores has no thread for each."""
    layout = Layout(tmp_path)
    layout.create()
    leases = Leases(layout, Processes(layout.folder("processes"), beat_s=0.02))
    before = set(threading.enumerate())
    leases._processes.me()
    (heart,) = set(threading.enumerate()) - before
    time.sleep(0.1)
    assert heart.is_alive(), "as long as anybody uses the store"
    del leases
    gc.collect()
    heart.join(20)
    assert not heart.is_alive()


def test_a_lost_heartbeat_file_comes_back(folder):
    processes = Processes(folder, beat_s=0.02)
    beat = folder / processes.me()
    beat.unlink()
    assert is_soon(beat.exists)


def test_a_fork_is_a_process_of_its_own(processes, folder):
    me = processes.me()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, processes.me().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert theirs.split(".")[1] == str(child)
    assert set(os.listdir(folder)) == {me, theirs}
    assert not processes.is_alive(theirs)


def test_the_dead_are_forgotten_and_the_living_are_not(processes, folder):
    me = processes.me()
    (folder / f"{_host()}.999999999.5").touch()
    (folder / "otherhost.1.1").touch()
    (folder / "silent.1.1").touch()
    os.utime(folder / "silent.1.1", (1, 1))
    (folder / "a directory").mkdir()  # not ours; left alone
    processes.sweep()
    assert set(os.listdir(folder)) == {me, "otherhost.1.1", "a directory"}
