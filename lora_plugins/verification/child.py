"""The process that reads and converts adapters, under limits: a request at a time on stdin, answers on stdout.

The process imports neither vLLM nor torch, gets none of the server's variables, and ends when its parent does.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import MAX_CONFIG_BYTES
from lora_plugins.adapter.layouts.writing import write_weights
from lora_plugins.adapter.verify import verify_adapter, verify_config
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.verification.limits import (
    MAX_FILES,
    MAX_MEMORY_BYTES,
    cpu_s,
    lack_of_memory,
    too_low,
    too_much_memory,
)
from lora_plugins.verification.messages import (
    LENGTH_BYTES,
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
    answer_of,
    decode_request,
    encode,
    framed,
)

_LOOK_AT_PARENT_MS = 1000
_MAX_KEPT_KIB = 256 << 10
_NICENESS = 10  # the engine's computation goes first
_LANDED_BYTES = 4 << 20


def main() -> None:
    """Answer requests until stdin ends, or until a request has taken much memory or time: the parent starts another."""
    # Descriptor 1 becomes stderr: a library's print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.nice(_NICENESS)
    # No core dump: an adapter that crashes this process must not fill the disk with its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    import numpy as np  # noqa: F401 - now, and not while a request waits

    _send(answers, Ready())
    while True:
        request = _receive()
        if request is None or isinstance(request, Tensors):
            return
        for answer in _written(request, answers) if isinstance(request, Write) else _answer(request):
            _send(answers, answer)
        answers.flush()
        if _most_memory_kib() > _MAX_KEPT_KIB or _has_computed_long():
            return  # memory may never be freed, and the next adapter may need all of the time


def _answer(request: Read) -> Iterator[PartOfAdapter | Verified | Refused]:
    _set_limits(request)
    directory = Path(os.fsdecode(request.directory))
    try:
        if request.config_only:
            yield from answer_of(ReadAdapter(verify_config(directory, request.settings), b""))
            return
        verified = verify_adapter(directory, None, request.settings)
        canonical = canonical_bytes(verified.config)
        if len(canonical) > MAX_CONFIG_BYTES:
            raise InvalidAdapter(
                f"ranks and alphas of so many modules that they take {len(canonical)} bytes",
                expected=f"at most {MAX_CONFIG_BYTES}",
                remedy="train it with one rank and alpha",
            )
        yield from answer_of(ReadAdapter(verified, canonical))
    except LoRAPluginsError as error:
        yield Refused(_of_limits(error).plain())
    # Of the limit RLIMIT_DATA, or of the machine; `too_much_memory` finds out.
    except MemoryError:
        yield Refused(too_much_memory().plain())
    except Exception as unforeseen:  # noqa: BLE001 - a mistake of ours, not the adapter's
        what = f"a failure to read it: {type(unforeseen).__name__}: {str(unforeseen)[:200]}"
        yield Refused(SourceUnavailable(what, expected="an adapter", remedy="report it with the adapter").plain())


def _of_limits(error: LoRAPluginsError) -> LoRAPluginsError:
    """Return an error that names the lacking resource of the server's process or machine, or else the error itself."""
    if getattr(error.__cause__, "errno", None) == errno.EMFILE:
        return too_low("RLIMIT_NOFILE", str(MAX_FILES))
    if isinstance(error.__cause__, MemoryError):
        return lack_of_memory() or error
    return error


def _written(request: Write, answers: BinaryIO) -> Iterator[Written | WriteFailed | Refused]:
    """Write tensors, and report the bytes written from time to time."""
    more_bytes = 4 * request.largest_bytes
    _set_limits(request, more_bytes)
    directory = Path(os.fsdecode(request.directory))
    parts = [part for _ in range(request.count) if isinstance(part := _receive(), Tensors)]

    said = [0]

    def landed(size_bytes: int) -> None:
        if size_bytes - said[-1] >= _LANDED_BYTES:
            said.append(size_bytes)
            _send(answers, Landed(size_bytes))
            answers.flush()

    try:
        tensors = [tensor for part in parts for tensor in part.tensors]
        target = Path(os.fsdecode(request.target))
        write_weights(tensors, lambda file: directory / (file or WEIGHTS_FILE), target, landed)
        yield Written()
    except OSError as error:
        yield WriteFailed(error.errno or 0, error.strerror or type(error).__name__)
    except MemoryError:
        yield Refused(too_much_memory(more_bytes).plain())


def _set_limits(request: Read | Write, more_memory_bytes: int = 0) -> None:
    """Limit memory, and the processor's time from now on."""
    _limit(resource.RLIMIT_DATA, MAX_MEMORY_BYTES + more_memory_bytes)
    # Rounded up: RLIMIT_CPU is in whole seconds.
    _limit(resource.RLIMIT_CPU, int(_computed_s() + cpu_s(os.fsdecode(request.directory))) + 1)


def _limit(kind: int, most: int) -> None:
    """Set a limit, up to the limit that the starter of this process allows.

    At the starter's limit of computing the kernel kills, and the bytes are not at fault; at ours the kernel sends
    SIGXCPU.
    """
    allowed = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if allowed == resource.RLIM_INFINITY else min(most, allowed), allowed))


def _computed_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _has_computed_long() -> bool:
    """Whether half of this process's allowed computing time is over."""
    allowed_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return allowed_s != resource.RLIM_INFINITY and _computed_s() > allowed_s / 2


def _most_memory_kib() -> int:
    """Return the largest memory of this program; `ru_maxrss` would include the server's memory at the start.

    Source: Linux, fs/exec.c, `exec_mmap`.
    """
    # Fresh after `exec`: VmHWM belongs to the address space of this program alone.
    with Path("/proc/self/status").open() as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmHWM:")), 0)


def _send(answers: BinaryIO, answer: Answer) -> None:
    answers.write(framed(encode(answer)))
    # Other answers are flushed together, at the end of a request.
    if isinstance(answer, Ready):
        answers.flush()


def _receive() -> Request | None:
    length = sys.stdin.buffer.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return decode_request.decode(sys.stdin.buffer.read(int.from_bytes(length, "little")))


def _end_with_parent(parent: int) -> None:
    """End this process when the parent is gone: a killed parent cannot end a request in progress."""
    poll = select.poll()
    poll.register(0, 0)
    # A hang-up of stdin, or a new parent: a process that the server forked may hold the pipe open.
    while not any(event & select.POLLHUP for _, event in poll.poll(_LOOK_AT_PARENT_MS)) and os.getppid() == parent:
        pass
    os._exit(0)
