"""The server's side of one reading process: starts the process, asks it, and ends it after a breach of its limits.

Runs in the process that resolves adapters, in a thread of `children.py`, for one request at a time. In goes a request
with its lists; out come the answer of `child.py` and the answer's lists, the adapter's error, or `Lost`. What comes
from the process is not trusted: hostile bytes may control the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

import lora_plugins
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable, error_of
from lora_plugins.settings import environment
from lora_plugins.verification.process_limits import lacking, too_much, wall_s
from lora_plugins.verification.protocol import NO_LISTS, Items, Lists, Refused, Request, decode_answer, receive, send

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lora_plugins.verification.child import main
main()
"""
# None of the server's own variables: some are keys and secrets.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TZ")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_Answer = TypeVar("_Answer")
_Landed = Callable[[int], None]  # takes the bytes of a file that were written so far
_START_S = 60.0  # within which a process says that it is ready
_EXIT_S = 5.0  # for a process that has closed its socket to end by itself, so that its exit status shows why
_PAUSE_S = 0.0002  # other threads get the interpreter's lock between two messages
_MAX_KEPT_KIB = 256 << 10  # of memory; a process that once took more is replaced
# Python's exit code of an uncaught exception. The child catches and reports everything that reading the bytes raises,
# so this code comes from elsewhere, and does not blame the bytes.
_EXCEPTION = 1
# Crashes that bytes may cause by a library's fault. A lack of memory or a faulty machine crashes too, so a crash counts
# only where each process crashes on the same bytes, with memory to spare. Other signals come from elsewhere; SIGBUS
# comes from a disk below a mapped file.
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})


class Lost(Exception):
    """The process ended before its answer, and another process may be asked.

    Attributes:
        error: for the caller, if every process ends so; it blames the bytes only where nothing else explains the end.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        # As in `subprocess`: a code below 0 is the signal that ended the process.
        how = f"code {code}" if code >= 0 else signal.strsignal(-code) or f"signal {-code}"
        self.error: LoRAPluginsError = lacking() or (
            too_much(f"ends the process that reads it, each time, by {how}")
            if code in _CRASHES or (code >= 0 and code != _EXCEPTION)
            else SourceUnavailable(
                f"an adapter whose reading process is killed or fails, each time, by {how}",
                expected="a process that may run until it has answered",
                remedy="ask again; look for what kills processes on this machine: too little memory, or RLIMIT_CPU",
            )
        )


class ReadingProcess:
    """A process that answers one request at a time.

    Raises at construction:
        SourceUnavailable: the process does not start.
    """

    def __init__(self) -> None:
        self._owes_answer = False
        # "" stands for the working directory, which is another in the child, so it is left out.
        path = [*(entry for entry in sys.path if entry), str(Path(lora_plugins.__file__).resolve().parents[1])]
        try:
            self._socket, theirs = socket.socketpair()  # `theirs` is the end of the child, as its standard input
            self._connection = Connection(os.dup(self._socket.fileno()))
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                    # -I: neither PYTHONPATH nor the working directory may bring in modules; the parent passes its
                    # import path.
                    [sys.executable, "-I", "-c", _PROGRAM, json.dumps(path), str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: value for name, value in environment().items() if name in _VARIABLES} | _ONE_THREAD,
                    cwd="/",
                    # A terminal's Ctrl-C reaches the server alone, which ends its children itself.
                    start_new_session=True,
                )
        except OSError as error:
            raise _not_started(str(error)) from error
        try:
            with self._within(_START_S):
                self._connection.recv_bytes(0)  # the child says that it is ready by an empty message
        except (EOFError, OSError, RuntimeError):  # RuntimeError: the thread of the timer cannot start
            raise _not_started(f"it ended with {self.end(_EXIT_S)}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the process can take a request.

        A ready process has answered every earlier request, runs, is not stopped (as by SIGSTOP), and has not taken much
        memory, which it may never free.
        """
        if self._owes_answer or self._process.poll() is not None:
            return False
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:  # the server may open no further file; the caller then ends this child, which frees files
            return False
        # `ru_maxrss` would include the server's memory at the start; VmHWM is of this program alone (Linux, fs/exec.c).
        most = re.search(r"(?ms)^State:\s*[RSD].*^VmHWM:\s*(\d+)", status)
        return most is not None and int(most[1]) <= _MAX_KEPT_KIB

    def ask(
        self, request: Request, kind: type[_Answer], lists: Lists = NO_LISTS, landed: _Landed = lambda _: None
    ) -> tuple[_Answer, Lists]:
        """Return the answer, of this kind, and its lists; call `landed` with the bytes of a file written so far.

        After a breach of a limit `is_ready` is false.

        Raises:
            LoRAPluginsError: the error that reading the adapter raises; InvalidAdapter also for a breach of a limit.
            SourceUnavailable: no answer in time; the bytes are not to blame.
            Lost: ask another process.
        """
        if not self.is_ready:
            raise Lost(self.end())  # another process may be ready

        def after_items(part: Items) -> None:
            for size_bytes in part.landed:
                landed(size_bytes)
            time.sleep(_PAUSE_S)

        limit_s = wall_s(os.fsdecode(request.directory))
        ends_at = time.monotonic() + limit_s
        self._owes_answer = True
        try:
            with self._within(limit_s):
                send(self._connection, request, lists)
                answer, found = receive(self._connection, decode_answer, after_items)
                refusal = error_of(json.loads(answer.error)) if isinstance(answer, Refused) else None
                if refusal is None and not isinstance(answer, kind):
                    raise TypeError(answer)
            self._owes_answer = False  # a refusal is an answer too
        # What a process under hostile control says may raise any of these.
        except (EOFError, OSError, ValueError, TypeError, LookupError, RuntimeError, msgspec.MsgspecError):
            is_late = time.monotonic() >= ends_at
            # A late process still runs: no reason to wait for its end.
            code = self.end(0 if is_late else _EXIT_S)
            if is_late:
                raise SourceUnavailable(
                    f"no answer within {limit_s:.0f} s of the process that reads it, which has hardly computed",
                    expected="a disk and a machine on which it is read at once",
                    remedy="ask again; look for a disk that stalls, or a machine without a free core",
                ) from None
            if code == -signal.SIGXCPU:  # our limit of computing; the host's limit kills
                raise too_much("takes too long to read") from None
            raise Lost(code) from None
        if refusal is not None:
            raise refusal
        return answer, found

    def end(self, wait_s: float = 0.0) -> int:
        """End the process if it still runs after `wait_s`; return its exit status, below 0 for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        self._connection.close()
        self._socket.close()
        return self._process.wait()

    @contextlib.contextmanager
    def _within(self, limit_s: float) -> Iterator[None]:
        """Shut the socket down after `limit_s`, whatever the process does: reads and writes of the block then end."""
        timer = threading.Timer(limit_s, self._socket.shutdown, [socket.SHUT_RDWR])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _not_started(why: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"no process that reads adapters ({why})",
        expected="one beside the server",
        remedy="look for limits of processes, open files and memory on this machine",
    )
