"""One process that reads adapters: started, asked, and ended when it has overstepped its limits."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

import lora_plugins
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable, error_of
from lora_plugins.settings import environment
from lora_plugins.verification.limits import MAX_MEMORY_BYTES, lack_of_memory, wall_s
from lora_plugins.verification.messages import (
    LENGTH_BYTES,
    MAX_ANSWER_BYTES,
    MAX_FRAME_BYTES,
    Answer,
    Failed,
    Found,
    Landed,
    Part,
    Read,
    Ready,
    Refused,
    Request,
    Tensors,
    Verified,
    Write,
    Written,
    decode_answer,
    encode,
    found_of,
    framed,
)

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lora_plugins.verification.child import main
main()
"""
# None of the server's own: there are keys and secrets among them.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TZ")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 60.0
_EXIT_S = 5.0
_PIECE_BYTES = 1 << 16
_LOOK_S = 1.0  # how often it is looked at while it says nothing
_PAUSE_S = 0.0002  # other threads get the interpreter's lock between two messages
_EXCEPTION = 1  # Python's code of one that nobody caught: what reading the bytes raises is caught, and said
# Crashes, which bytes may bring about that some library cannot read; so may a lack of memory or a faulty machine, so
# they count where each process crashes that is given the same bytes, with memory to spare. Other signals come from
# elsewhere, SIGBUS from a disk below a file in memory.
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})


class Lost(Exception):
    """It has ended before it has answered; `error` is for where that is so each time, and may be of the bytes."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        is_of_bytes = code in _CRASHES or (code >= 0 and code != _EXCEPTION)
        self.error: LoRAPluginsError = (
            lack_of_memory() or _too_much(_words_of(code))
            if is_of_bytes
            else _killed("is killed" if code < 0 else "fails")
        )


class ReadingProcess:
    """A process that answers one request at a time.

    Raises at construction:
        SourceUnavailable: it does not start.
    """

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-I", "-c", _PROGRAM, json.dumps(import_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**variables_of_children(), **_ONE_THREAD},
                cwd="/",
                start_new_session=True,  # no Ctrl-C of a terminal reaches it
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        self._left = bytearray()
        try:
            first = next(self._answers(time.monotonic() + _START_S))
        except (TimeoutError, EOFError, msgspec.MsgspecError):
            raise _not_started(f"it ended with {self.end(wait_s=_EXIT_S)}") from None
        if not isinstance(first, Ready):
            self.end()
            raise _not_started("it answers something else")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def read(self, request: Read) -> Found:
        """What the adapter is, and the configuration that engines read of it; see `verify_adapter`.

        Where it has overstepped a limit, `is_alive` is false afterwards.

        Raises:
            InvalidAdapter: also where it has overstepped a limit.
            SourceUnavailable: it does not answer in time, which says nothing of the bytes.
            Lost: ask another process.
        """
        parts: list[Part] = []
        for answer in self._conversation([request], request.directory):
            if isinstance(answer, Part):
                parts.append(answer)
                time.sleep(_PAUSE_S)
            elif isinstance(answer, Verified):
                return found_of(parts, answer)
        raise Lost(0)

    def write(self, requests: Sequence[Write | Tensors], directory: bytes, landed: Callable[[int], None]) -> None:
        """Have tensors written, of the files in `directory`; `landed` is called with the bytes that are there so far.

        Raises:
            OSError: a file cannot be read or written.
            InvalidAdapter, SourceUnavailable, Lost: as `read`.
        """
        for answer in self._conversation(requests, directory):
            if isinstance(answer, Landed):
                landed(answer.size_bytes)
            elif isinstance(answer, Failed):
                raise OSError(answer.errno, answer.strerror)
            elif isinstance(answer, Written):
                return
        raise Lost(0)

    def _conversation(self, requests: Sequence[Request], directory: bytes) -> Iterator[Answer]:
        """Its answers to this, which is about the files in `directory`."""
        limit_s = wall_s(os.fsdecode(directory))
        try:
            for request in requests:
                self._ask(request)
            for answer in self._answers(time.monotonic() + limit_s):
                if isinstance(answer, Refused):
                    raise error_of(answer.error)
                if isinstance(answer, Ready):  # only once
                    break
                yield answer
            raise EOFError
        except TimeoutError:
            self.end()
            raise SourceUnavailable(
                f"no answer within {limit_s:.0f} s of the process that reads it, which has hardly computed",
                expected="a disk and a machine on which it is read at once",
                remedy="ask again; look for a disk that stalls, or a machine without a free core",
            ) from None
        except (EOFError, BrokenPipeError, msgspec.MsgspecError):
            code = self.end(wait_s=_EXIT_S)
            if code == -signal.SIGXCPU:  # at our limit, of time that it has computed: that of the host kills
                raise _too_much("that takes too long to read") from None
            raise Lost(code) from None

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None and not self._left

    def _is_stopped(self) -> bool:
        """Whether somebody has stopped it, and nobody continues it."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def end(self, wait_s: float = 0.0) -> int:
        """End it where it still runs after this time; how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait()

    def _ask(self, request: Request) -> None:
        if self._process.stdin is None:
            raise EOFError
        self._process.stdin.write(framed(encode(request)))
        self._process.stdin.flush()

    def _answers(self, ends_at: float) -> Iterator[Answer]:
        """Its messages as they come.

        Raises:
            TimeoutError, EOFError: they end. MsgspecError: it says something else.
        """
        total = 0
        while True:
            frame_bytes = int.from_bytes(self._receive(LENGTH_BYTES, ends_at), "little")
            total += frame_bytes
            if frame_bytes > MAX_FRAME_BYTES or total > MAX_ANSWER_BYTES:
                raise EOFError
            yield decode_answer.decode(self._receive(frame_bytes, ends_at))

    def _receive(self, count: int, ends_at: float) -> bytes:
        if self._process.stdout is None:
            raise EOFError
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(self._left) < count:
            left_s = ends_at - time.monotonic()
            if not poll.poll(max(0.0, min(left_s, _LOOK_S)) * 1000):
                if left_s <= _LOOK_S:
                    raise TimeoutError
                if self._is_stopped():
                    self._process.kill()  # another is asked in its place
                continue
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                raise EOFError
            self._left += piece
        data = bytes(self._left[:count])
        del self._left[:count]
        return data


def variables_of_children() -> dict[str, str]:
    """The environment of a process that needs none of the server's own variables."""
    return {name: value for name, value in environment().items() if name in _VARIABLES}


def import_path() -> list[str]:
    """`sys.path` for a child of another working directory that imports what this process does."""
    root = str(Path(lora_plugins.__file__).resolve().parents[1])
    path = [entry for entry in sys.path if entry]  # "" is the working directory, which is another there
    return path if root in path else [*path, root]


def _words_of(code: int) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    return f"that ends the process that reads it, each time, by {how}"


def _killed(how: str) -> SourceUnavailable:
    allowed_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = "" if allowed_s == resource.RLIM_INFINITY else f", where RLIMIT_CPU allows it {allowed_s} s"
    return SourceUnavailable(
        f"an adapter whose reading process {how}, each time{limit}",
        expected="a process that may run until it has answered",
        remedy="ask again; look for what kills processes on this machine: too little memory, or such a limit",
    )


def _too_much(found: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"an adapter {found}",
        expected=f"one that is read at once, in {MAX_MEMORY_BYTES >> 20} MiB of memory",
        remedy="save the adapter again with PEFT",
    )


def _not_started(why: str) -> SourceUnavailable:
    return SourceUnavailable(
        f"no process that reads adapters ({why})",
        expected="one beside the server",
        remedy="look for limits of processes, open files and memory on this machine",
    )
