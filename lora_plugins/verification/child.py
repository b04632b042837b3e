"""The process that reads and converts adapters: one request at a time from stdin, its answer on stdout, under limits.

It imports neither vLLM nor torch, gets none of the server's variables, and ends when its parent does.
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
from lora_plugins.adapter.verify import verify_adapter
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
    answer_of,
    decode_request,
    encode,
    framed,
)

_LOOK_AT_PARENT_MS = 1000
_MAX_KEPT_KIB = 256 << 10
_NICENESS = 10  # what engines compute at the same time goes first
_LANDED_BYTES = 4 << 20


def main() -> None:
    """Answer until stdin ends."""
    # Whatever a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    import numpy as np  # noqa: F401 - now, and not while somebody waits

    _send(answers, Ready())
    while True:
        request = _receive()
        if request is None or isinstance(request, Tensors):
            return
        for answer in _written(request, answers) if isinstance(request, Write) else _answer(request):
            _send(answers, answer)
        answers.flush()
        if _most_memory_kib() > _MAX_KEPT_KIB or _has_computed_long():
            return  # what it took, it may never free, and the next adapter may need all of the time


def _answer(request: Read) -> Iterator[Part | Verified | Refused]:
    _set_limits(request)
    try:
        verified = verify_adapter(Path(os.fsdecode(request.directory)), None, request.settings)
        canonical = canonical_bytes(verified.config)
        if len(canonical) > MAX_CONFIG_BYTES:
            raise InvalidAdapter(
                f"ranks and alphas of so many modules that they take {len(canonical)} bytes",
                expected=f"at most {MAX_CONFIG_BYTES}",
                remedy="train it with one rank and alpha",
            )
        yield from answer_of(Found(verified, canonical))
    except LoRAPluginsError as error:
        yield Refused(_of_limits(error).plain())
    except MemoryError:
        yield Refused(too_much_memory().plain())
    except Exception as unforeseen:  # noqa: BLE001 - a mistake of ours, and no adapter's
        what = f"a failure to read it: {type(unforeseen).__name__}: {str(unforeseen)[:200]}"
        yield Refused(SourceUnavailable(what, expected="an adapter", remedy="report it with the adapter").plain())


def _of_limits(error: LoRAPluginsError) -> LoRAPluginsError:
    """What of the server's process or its machine has brought this about, if anything has; else the error itself."""
    if getattr(error.__cause__, "errno", None) == errno.EMFILE:
        return too_low("RLIMIT_NOFILE", str(MAX_FILES))
    if isinstance(error.__cause__, MemoryError):
        return lack_of_memory() or error
    return error


def _written(request: Write, answers: BinaryIO) -> Iterator[Written | Failed | Refused]:
    """Write tensors, and say from time to time how far that is."""
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
        yield Failed(error.errno or 0, error.strerror or type(error).__name__)
    except MemoryError:
        yield Refused(too_much_memory(more_bytes).plain())


def _set_limits(request: Read | Write, more_memory_bytes: int = 0) -> None:
    """The kernel ends this process once it has computed for so long from now."""
    _limit(resource.RLIMIT_DATA, MAX_MEMORY_BYTES + more_memory_bytes)
    _limit(resource.RLIMIT_CPU, int(_computed_s() + cpu_s(os.fsdecode(request.directory))) + 1)


def _limit(kind: int, most: int) -> None:
    """Set a limit, or as much of it as whoever has started this process allows.

    At that limit of computing the kernel kills, which is nothing that the bytes have done; at ours it sends SIGXCPU.
    """
    allowed = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if allowed == resource.RLIM_INFINITY else min(most, allowed), allowed))


def _computed_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _has_computed_long() -> bool:
    """Whether half of the time is over that this process is allowed."""
    allowed_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return allowed_s != resource.RLIM_INFINITY and _computed_s() > allowed_s / 2


def _most_memory_kib() -> int:
    """What this program had at most, where `ru_maxrss` says what the server had when it started it, if that is more.

    Source: Linux, fs/exec.c, `exec_mmap`.
    """
    with Path("/proc/self/status").open() as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmHWM:")), 0)


def _send(answers: BinaryIO, answer: Answer) -> None:
    answers.write(framed(encode(answer)))
    if isinstance(answer, Ready):
        answers.flush()


def _receive() -> Request | None:
    length = sys.stdin.buffer.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return decode_request.decode(sys.stdin.buffer.read(int.from_bytes(length, "little")))


def _end_with_parent(parent: int) -> None:
    """A parent that is killed closes no request that is being answered."""
    poll = select.poll()
    poll.register(0, 0)
    while not any(event & select.POLLHUP for _, event in poll.poll(_LOOK_AT_PARENT_MS)) and os.getppid() == parent:
        pass
    os._exit(0)
