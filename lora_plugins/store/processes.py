"""Which processes use the store and are alive, on this host and on others that share it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path

BEAT_S = 5.0
SILENT_S = 60.0


class Processes:
    """This process's heartbeat, and judgement on others.

    A process is named `<host>.<pid>.<start>`. Where pids are comparable (same boot, same pid namespace) a process is
    alive if the kernel says so; elsewhere, if its file was touched within the last minute by the file system's own
    clock, so that hosts need not agree on the time.
    """

    def __init__(self, folder: Path, *, silent_s: float = SILENT_S, beat_s: float = BEAT_S) -> None:
        self._folder = folder
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._guard = threading.Lock()
        self._beating_pid = 0

    def me(self) -> str:
        """This process's name; its heartbeat has started when this returns."""
        name = _name(os.getpid())
        with self._guard:
            if self._beating_pid != os.getpid():  # first use, or a fork
                self._touch(name)
                threading.Thread(target=self._beat, args=(name,), daemon=True, name="lora-plugins-heartbeat").start()
                self._beating_pid = os.getpid()
        return name

    def is_alive(self, name: str) -> bool:
        """Whether the process of this name still runs."""
        host, _, rest = name.partition(".")
        pid, _, start = rest.partition(".")
        if not (pid.isdecimal() and start.isdecimal()) or "/" in host:
            return False  # not one of our names, or one that a power failure cut short
        if host == _host():
            return _start_of(int(pid)) == start
        try:
            beat = (self._folder / name).stat().st_mtime
        except OSError:
            return False
        return self._now() - beat < self._silent_s

    def describe(self, name: str) -> str:
        """A process's name as people know it."""
        host, _, rest = name.partition(".")
        where = "this host" if host == _host() else "another host or container"
        return f"process {rest.partition('.')[0]} of {where}"

    def sweep(self) -> None:
        """Forget the heartbeats of the dead."""
        for entry in list(os.scandir(self._folder)):
            if not self.is_alive(entry.name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(entry.path)

    def _now(self) -> float:
        """The file system's clock, read off our own heartbeat."""
        return self._touch(self.me())

    def _touch(self, name: str) -> float:
        path = self._folder / name
        path.touch()
        os.utime(path)
        return path.stat().st_mtime

    def _beat(self, name: str) -> None:
        while os.getpid() == self._beating_pid or self._beating_pid == 0:
            time.sleep(self._beat_s)
            with contextlib.suppress(OSError):  # a store that is gone for a while must not end the thread
                self._touch(name)


def _name(pid: int) -> str:
    return f"{_host()}.{pid}.{_start_of(pid)}"


@functools.cache
def _host() -> str:
    """Equal for processes whose pids are comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot}-{namespace}"


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty where it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
