"""A reading process: started, asked, and ended after a breach of its limits."""

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
    Landed,
    PartOfAdapter,
    Read,
    ReadAdapter,
    Ready,
    Refused,
    Request,
    Tensors,
    Verified,
    Write,
    WriteFailed,
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
# None of the server's own variables: some are keys and secrets.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TZ")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 60.0
_EXIT_S = 5.0
_PIECE_BYTES = 1 << 16
_LOOK_S = 1.0  # how often a silent process is looked at
_PAUSE_S = 0.0002  # other threads get the interpreter's lock between two messages
# Python's code of an uncaught exception. The child catches and reports everything that reading the bytes raises.
_EXCEPTION = 1
# Crashes that bytes may cause by a library's fault. A lack of memory or a faulty machine crashes too, so a crash counts
# only where each process crashes on the same bytes, with memory to spare. Other signals come from elsewhere; SIGBUS
# comes from a disk below a mapped file.
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE})


class Lost(Exception):
    """The process ended before its answer; `error` is for bytes that end every process, and may blame the bytes."""

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
        SourceUnavailable: the process does not start.
    """

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                # -I: neither PYTHONPATH nor the working directory may bring in modules; the parent passes its import
                # path.
                [sys.executable, "-I", "-c", _PROGRAM, json.dumps(import_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**variables_of_children(), **_ONE_THREAD},
                cwd="/",
                # A terminal's Ctrl-C reaches the server alone, which ends its children itself.
                start_new_session=True,
            )
            os.set_blocking(self._stdin, False)
        except OSError as error:
            raise _not_started(str(error)) from error
        # Bytes of a message that `os.read` cut; bytes left at the end make the process unusable.
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

    def read(self, request: Read) -> ReadAdapter:
        """Return the adapter, and the configuration that engines read; see `verify_adapter`.

        After a breach of a limit `is_alive` is false.

        Raises:
            InvalidAdapter: the adapter is at fault, a breach of a limit included.
            SourceUnavailable: no answer in time; the bytes are not to blame.
            Lost: ask another process.
        """
        parts: list[PartOfAdapter] = []
        for answer in self._conversation([request], request.directory):
            if isinstance(answer, PartOfAdapter):
                parts.append(answer)
                # Between two messages other threads of the server get the interpreter's lock.
                time.sleep(_PAUSE_S)
            elif isinstance(answer, Verified):
                return found_of(parts, answer)
        raise Lost(0)

    def write(self, requests: Sequence[Write | Tensors], directory: bytes, landed: Callable[[int], None]) -> None:
        """Write tensors of the files in `directory`; call `landed` with the bytes written so far.

        Raises:
            OSError: a file cannot be read or written.
            InvalidAdapter, SourceUnavailable, Lost: as `read`.
        """
        for answer in self._conversation(requests, directory):
            if isinstance(answer, Landed):
                landed(answer.size_bytes)
            elif isinstance(answer, WriteFailed):
                raise OSError(answer.errno, answer.strerror)
            elif isinstance(answer, Written):
                return
        raise Lost(0)

    def _conversation(self, requests: Sequence[Request], directory: bytes) -> Iterator[Answer]:
        """Yield the answers to `requests`, which are about the files in `directory`."""
        limit_s = wall_s(os.fsdecode(directory))
        ends_at = time.monotonic() + limit_s
        try:
            for request in requests:
                self._ask(request, ends_at)
            for answer in self._answers(ends_at):
                if isinstance(answer, Refused):
                    raise error_of(answer.error)
                if isinstance(answer, Ready):  # only at the start: a second `Ready` breaks the protocol
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
            if code == -signal.SIGXCPU:  # our limit of computing; the host's limit kills
                raise _too_much("that takes too long to read") from None
            raise Lost(code) from None

    @property
    def is_alive(self) -> bool:
        """Whether the process can take another request."""
        return self._process.poll() is None and not self._left

    def _is_stopped(self) -> bool:
        """Whether somebody has stopped the process (SIGSTOP) without continuing it."""
        # WNOWAIT: the status stays for `Popen.wait`.
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def end(self, wait_s: float = 0.0) -> int:
        """End the process if it still runs after `wait_s`; return its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait()

    @property
    def _stdin(self) -> int:
        if self._process.stdin is None:
            raise EOFError
        return self._process.stdin.fileno()

    def _ask(self, request: Request, ends_at: float) -> None:
        left = memoryview(framed(encode(request)))
        while left:
            self._wait(self._stdin, select.POLLOUT, ends_at)
            left = left[os.write(self._stdin, left[:_PIECE_BYTES]) :]

    def _answers(self, ends_at: float) -> Iterator[Answer]:
        """Yield the process's messages as they come.

        Raises:
            TimeoutError, EOFError: no further message. MsgspecError: a message of another form.
        """
        total = 0
        while True:
            frame_bytes = int.from_bytes(self._receive(LENGTH_BYTES, ends_at), "little")
            total += frame_bytes
            # The limits stop a process under hostile control from filling the server's memory.
            if frame_bytes > MAX_FRAME_BYTES or total > MAX_ANSWER_BYTES:
                raise EOFError
            yield decode_answer.decode(self._receive(frame_bytes, ends_at))

    def _receive(self, count: int, ends_at: float) -> bytes:
        if self._process.stdout is None:
            raise EOFError
        descriptor = self._process.stdout.fileno()
        while len(self._left) < count:
            self._wait(descriptor, select.POLLIN, ends_at)
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                raise EOFError
            self._left += piece
        data = bytes(self._left[:count])
        del self._left[:count]
        return data

    def _wait(self, descriptor: int, event: int, ends_at: float) -> None:
        # `select` refuses descriptors above 1023, which a server with many connections has.
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(max(0.0, min(left_s := ends_at - time.monotonic(), _LOOK_S)) * 1000):
            if left_s <= _LOOK_S:
                raise TimeoutError
            if self._is_stopped():
                self._process.kill()  # another process takes the request


def variables_of_children() -> dict[str, str]:
    """Return the environment of a process that needs none of the server's own variables."""
    return {name: value for name, value in environment().items() if name in _VARIABLES}


def import_path() -> list[str]:
    """Return a `sys.path` for a child in another working directory that imports this process's modules."""
    root = str(Path(lora_plugins.__file__).resolve().parents[1])
    path = [entry for entry in sys.path if entry]  # "" is the working directory, and the child has another
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
