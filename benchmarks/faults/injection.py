"""Faults of the machine below a running server, each with its end: processes, limits, file systems, clock, sources."""

from __future__ import annotations

import contextlib
import errno
import random
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed import faults
from testbed.proxy import FaultProxy

_SOURCE = Path(__file__).with_name("interposer.c")
_OPEN, _READ, _WRITE, _SYNC = 1, 2, 4, 8
ENOSPC_CALLS = _OPEN | _WRITE | _SYNC


class Interposer:
    """A library of `interposer.c`, compiled into `home`, whose faults all processes have that are started with `env`.

    The processes that read adapters get none of the server's variables, and so none of these faults.
    """

    def __init__(self, home: Path, under: list[Path]) -> None:
        self._library, self._control = home / "interposer.so", home / "interposer.control"
        self._under = under
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"],
            check=True,
        )
        self._control.write_bytes(struct.pack("4i", 0, 0, 0, 0))

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "INTERPOSER_CONTROL": str(self._control),
            "INTERPOSER_UNDER": ":".join(map(str, self._under)),
        }

    def failing(self, number: int, per_1000: int, calls: int) -> AbstractContextManager[None]:
        """Inside, so many of these calls fail with this errno."""
        return self._set(number, per_1000, calls, 0)

    def jumped(self, seconds: int) -> AbstractContextManager[None]:
        """Inside, the clock of the day is off by so much."""
        return self._set(0, 0, 0, seconds)

    @contextmanager
    def _set(self, *values: int) -> Iterator[None]:
        self._write(*values)
        try:
            yield
        finally:
            self._write(0, 0, 0, 0)

    def _write(self, *values: int) -> None:
        with self._control.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("4i", *values))


@dataclass(frozen=True)
class Machine:
    """What faults are put into: a server's process, its interposer, and the proxy of its object store."""

    pid: int
    interposer: Interposer
    proxy: FaultProxy

    def readers(self) -> list[psutil.Process]:
        """The processes that read adapters for the server."""
        found = []
        for process in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if "lora_plugins.verification.child" in " ".join(process.cmdline()):
                    found.append(process)
        return found


def _each(processes: list[psutil.Process], do: Callable[[psutil.Process], object]) -> None:
    """Do this to those that have not ended meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.Error, PermissionError):
            do(process)


@contextmanager
def _killed(machine: Machine, rng: random.Random) -> Iterator[None]:
    """Again and again, as the OOM killer does it."""
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.2):
            _each(machine.readers(), psutil.Process.kill)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _stopped(machine: Machine, rng: random.Random) -> Iterator[None]:
    stopped = machine.readers()
    _each(stopped, psutil.Process.suspend)
    try:
        yield
    finally:
        _each(stopped, psutil.Process.resume)


@contextmanager
def _limited_readers(machine: Machine, rng: random.Random) -> Iterator[None]:
    """Less memory, computing or files than reading takes; a limit holds for a process's life, so these are ended."""
    kind, most = rng.choice(
        ((psutil.RLIMIT_DATA, 1 << 20), (psutil.RLIMIT_AS, 1 << 20), (psutil.RLIMIT_CPU, 1), (psutil.RLIMIT_NOFILE, 4))
    )
    limited = machine.readers()
    _each(limited, lambda process: process.rlimit(kind, (most, most)))
    try:
        yield
    finally:
        _each(limited, psutil.Process.kill)


@contextmanager
def _few_files(machine: Machine, rng: random.Random) -> Iterator[None]:
    """EMFILE for whatever the server opens or accepts next."""
    process = psutil.Process(machine.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + rng.choice((0, 2)), before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


@contextmanager
def _hung(machine: Machine, rng: random.Random) -> Iterator[None]:
    """Requests to the object store get no answer until this ends."""
    ended = threading.Event()
    machine.proxy.plan(faults.run_before(ended.wait), times=None)
    try:
        yield
    finally:
        machine.proxy.clear()
        ended.set()


@contextmanager
def _answering(machine: Machine, rng: random.Random) -> Iterator[None]:
    """The object store refuses, breaks off, or sends damaged bytes."""
    fault, path = rng.choice(
        (
            (faults.slow_down(), ""),
            (faults.server_error(), ""),
            (faults.reset(100), ""),
            (faults.short(1000), ""),
            (faults.flip(2000), "safetensors"),
        )
    )
    machine.proxy.plan(fault, path=path, times=None)
    try:
        yield
    finally:
        machine.proxy.clear()


Fault = Callable[[Machine, random.Random], AbstractContextManager[None]]


def _disk(number: int, calls: int) -> Fault:
    return lambda machine, rng: machine.interposer.failing(number, rng.choice((50, 300, 1000)), calls)


FAULTS: dict[str, Fault] = {
    "readers killed": _killed,
    "readers stopped": _stopped,
    "readers limited": _limited_readers,
    "EMFILE, by RLIMIT_NOFILE": _few_files,
    "EMFILE": _disk(errno.EMFILE, _OPEN),
    "EIO": _disk(errno.EIO, _OPEN | _READ | _WRITE | _SYNC),
    "ESTALE": _disk(errno.ESTALE, _OPEN | _READ),
    "ENOSPC": _disk(errno.ENOSPC, ENOSPC_CALLS),
    "source hangs": _hung,
    "source fails": _answering,
    "clock jumps": lambda machine, rng: machine.interposer.jumped(rng.choice((-86_400, -600, 600, 86_400, 40_000_000))),
}
