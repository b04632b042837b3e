"""Processes that use the store, on this host and others, and whether they are alive.

Each process that opens a store touches a file there every few seconds, in a thread of its own (the heartbeat). In goes
the name of a process, as leases and temporary files bear it; out comes whether the process lives, so that others may
remove what it left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

BEAT_S = 5.0
SILENT_S = 60.0
_GONE_AFTER = 10  # times `silent_s`, until files of another host's process are removed


class Processes:
    """This process's heartbeat, and judgement on others.

    A process is named `<host>.<pid>.<start>`. Where pids are comparable (same boot, same pid namespace) a process is
    alive if the kernel says so; elsewhere, if the process touched its file within the last minute by the file system's
    own clock, so that hosts need not agree on the time.

    A process that was silent itself (a frozen machine, a hung mount) notices at its next beat, by the same clock.

    Attributes:
        on_silence: called in a thread after a silence of this process, and again if the call raises OSError: others may
            have taken this process for dead meanwhile.
        on_beat: called in a thread before each beat.
    """

    def __init__(self, folder: Path, *, silent_s: float = SILENT_S, beat_s: float = BEAT_S) -> None:
        self._folder = folder
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._guard = threading.Lock()
        self._me, self._beating_pid = "", 0
        self.on_silence: Callable[[], None] | None = None
        self.on_beat: Callable[[], None] = lambda: None
        self._beating = threading.RLock()
        # `_beat_at` is of the file system's clock; CLOCK_BOOTTIME goes on while the machine is suspended, unlike
        # time.monotonic() on Linux.
        self._beat_at = 0.0
        self._tried_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._was_silent = False

    def me(self) -> str:
        """This process's name; the heartbeat has started when the call returns."""
        with self._guard:
            if self._beating_pid != os.getpid():  # first use, or a fork
                name = this_process()
                self._beat_at = self._touch(name)
                self._tried_at = time.clock_gettime(time.CLOCK_BOOTTIME)
                beating = weakref.ref(self), name, self._beat_s
                threading.Thread(target=_beat, args=beating, daemon=True, name="lora-plugins-heartbeat").start()
                self._me, self._beating_pid = name, os.getpid()
            return self._me

    def is_alive(self, name: str) -> bool:
        """Whether a process runs, or has beaten within the last minute; True where nobody can tell."""
        return self._has_beaten(name, self._silent_s)

    def is_gone(self, name: str) -> bool:
        """Whether a process does not run; False on another host after a beat within ten minutes: the host may sleep."""
        return not self._has_beaten(name, _GONE_AFTER * self._silent_s)

    def _has_beaten(self, name: str, within_s: float) -> bool:
        host, _, rest = name.partition(".")
        pid, _, start = rest.partition(".")
        if not (pid.isdecimal() and start.isdecimal()) or "/" in host:
            return False  # a foreign file, or a name that a power cut has shortened
        if host == _host():
            return _start_of(int(pid)) == start
        try:
            beat = (self._folder / name).stat().st_mtime
        except OSError:
            return False
        try:
            return self._now() - beat < within_s
        except OSError:  # a read-only store has no clock: count the process as living
            return True

    def is_awake(self) -> bool:
        """False where others may take this process for dead, or `on_silence` is still to run; takes a microsecond."""
        late_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self._tried_at
        return not self._was_silent and (late_s < self._silent_s / 2 or not self._beating_pid)

    def wake(self) -> None:
        """Return once this process is awake, for a thread.

        Raises:
            OSError: the store cannot be written.
        """
        if not self.is_awake():
            self._beat_once(self.me())

    def describe(self, name: str) -> str:
        """A process in words, for people."""
        host, _, rest = name.partition(".")
        where = "this host" if host == _host() else "another host or container"
        return f"process {rest.partition('.')[0]} of {where}"

    def sweep(self) -> None:
        """Remove the files of processes that are gone."""
        for entry in list(os.scandir(self._folder)):
            if self.is_gone(entry.name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(entry.path)

    def _now(self) -> float:
        """The file system's clock, read from this process's heartbeat."""
        return self._touch(self.me())

    def _touch(self, name: str) -> float:
        path = self._folder / name
        path.touch()
        os.utime(path)
        return path.stat().st_mtime

    def beat(self, name: str) -> None:
        """Call `on_beat`, and touch this process's file, as a thread does every few seconds."""
        for beat in (self.on_beat, lambda: self._beat_once(name)):
            with contextlib.suppress(OSError):  # a store that is away for a while must not end the thread
                beat()

    def _beat_once(self, name: str) -> None:
        with self._beating:
            try:
                was_there = (self._folder / name).exists()
                now = self._touch(name)
                # Half the time that others wait, so that this process notices a silence before others take it for dead.
                self._was_silent = self._was_silent or not was_there or now - self._beat_at > self._silent_s / 2
                self._beat_at = now
                if self._was_silent and self.on_silence is not None:
                    self.on_silence()
                self._was_silent = False
            finally:
                self._tried_at = time.clock_gettime(time.CLOCK_BOOTTIME)


def _beat(processes: weakref.ref[Processes], name: str, beat_s: float) -> None:
    """Beat until nobody has `processes` any more: a program may open many stores."""
    time.sleep(beat_s)
    while (there := processes()) is not None:
        there.beat(name)
        del there
        time.sleep(beat_s)


def this_process() -> str:
    """This process's name, without a heartbeat: other hosts take the process for dead."""
    return f"{_host()}.{os.getpid()}.{_start_of(os.getpid())}"


@functools.cache
def _host() -> str:
    """Equal for processes whose pids are comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    # Containers on one kernel share the boot id but not the pids: the pid namespace is then different.
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot}-{namespace}"


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty where it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # The command's name in parentheses may have spaces, so split after the last one; the state comes first, then the
    # start time as field 22 of proc(5). Zombies (Z) and the dead (X) do not count as running.
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
