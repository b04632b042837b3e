"""The program of a reading process: reads and converts adapters under limits, one request at a time.

`reading_process.py` starts the program in a process of its own. In come requests (`protocol.py`) from the socket at
descriptor 0; out go answers to the same socket, errors among them. The process imports neither vLLM nor torch, gets
none of the server's variables, and ends when its parent does.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import MAX_CONFIG_BYTES
from lora_plugins.adapter.layouts.writing import write_weights
from lora_plugins.adapter.verify import verify_adapter, verify_config
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.verification import protocol
from lora_plugins.verification.process_limits import MAX_FILES, MAX_MEMORY_BYTES, cpu_s, lacking, too_much

_NICENESS = 10  # the engine's computation goes first
_LANDED_BYTES = 4 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Answer requests until the parent, whose id is the second argument, ends this process."""
    # A killed parent cannot end a request in progress, and a process that the parent forked may hold the socket open.
    # The signal comes with the end of the parent's thread that has started this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    os.nice(_NICENESS)
    # No core dump: an adapter that crashes this process must not fill the disk with its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_NOFILE, MAX_FILES)
    import numpy as np  # noqa: F401 - now, and not while a request waits

    connection = Connection(0)
    connection.send_bytes(b"")  # ready
    while True:
        request, lists = protocol.receive(connection, protocol.decode_request)
        more_bytes = request.memory_bytes if isinstance(request, protocol.Write) else 0
        _set_limits(request, more_bytes)
        protocol.send(connection, *_answer(request, lists, more_bytes, connection))


def _answer(
    request: protocol.Request, lists: protocol.Lists, more_bytes: int, connection: Connection
) -> tuple[protocol.Answer, protocol.Lists]:
    """Return the answer and its lists: errors of the adapter, of the machine's limits, and our own are answers too.

    A request is a read, a write, or a call: the name of a function of this package, for bytes that only a process with
    limits should parse.
    """
    try:
        if isinstance(request, protocol.Read):
            return protocol.answer_of(_read(request))
        if isinstance(request, protocol.Write):
            return _written(request, lists, connection), protocol.NO_LISTS
        function = getattr(importlib.import_module(request.module), request.function)
        return protocol.Returned(), {"pieces": protocol.pieces(function(b"".join(lists["pieces"])))}
    except LoRAPluginsError as error:
        is_of_limits = isinstance(error.__cause__, MemoryError) or getattr(error.__cause__, "errno", 0) == errno.EMFILE
        refusal = (lacking() if is_of_limits else None) or error
    except MemoryError:  # of the limit RLIMIT_DATA, or of the machine
        max_mib = MAX_MEMORY_BYTES + more_bytes >> 20
        refusal = lacking(more_bytes) or too_much(f"takes more than {max_mib} MiB of memory")
    except Exception as unforeseen:  # noqa: BLE001 - a mistake of ours, not the adapter's
        what = f"a failure to read it: {type(unforeseen).__name__}: {str(unforeseen)[:200]}"
        refusal = SourceUnavailable(what, expected="an adapter", remedy="report it with the adapter")
    return protocol.Refused(json.dumps(refusal.plain()).encode()), protocol.NO_LISTS


def _read(request: protocol.Read) -> protocol.ReadAdapter:
    directory = Path(os.fsdecode(request.directory))
    if request.config_only:
        return protocol.ReadAdapter(verify_config(directory, request.settings), b"")
    verified = verify_adapter(directory, None, request.settings)
    canonical = canonical_bytes(verified.config)
    if len(canonical) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(
            f"ranks and alphas of so many modules that they take {len(canonical)} bytes",
            expected=f"at most {MAX_CONFIG_BYTES}",
            remedy="train it with one rank and alpha",
        )
    return protocol.ReadAdapter(verified, canonical)


def _written(request: protocol.Write, lists: protocol.Lists, connection: Connection) -> protocol.Written:
    """Write tensors, and report the bytes written from time to time."""
    directory, target = Path(os.fsdecode(request.directory)), Path(os.fsdecode(request.target))
    said_bytes = 0

    def landed(size_bytes: int) -> None:
        nonlocal said_bytes
        if size_bytes - said_bytes >= _LANDED_BYTES:
            said_bytes = size_bytes
            protocol.send(connection, protocol.Items(landed=(size_bytes,)))

    try:
        write_weights(lists["tensors"], lambda file: directory / (file or WEIGHTS_FILE), target, landed)
    except OSError as error:
        return protocol.Written(error.errno or errno.EIO, error.strerror or type(error).__name__)
    return protocol.Written()


def _set_limits(request: protocol.Request, more_memory_bytes: int) -> None:
    _limit(resource.RLIMIT_DATA, MAX_MEMORY_BYTES + more_memory_bytes)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Rounded up: RLIMIT_CPU is in whole seconds.
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + cpu_s(os.fsdecode(request.directory))) + 1)


def _limit(kind: int, most: int) -> None:
    """Set a limit, up to the limit that the starter of this process allows.

    For seconds of computing, the soft limit is ours: the kernel sends SIGXCPU, and the bytes are at fault. The hard
    limit is the starter's: the kernel kills, and the bytes are not at fault.
    """
    allowed = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if allowed == resource.RLIM_INFINITY else min(most, allowed), allowed))
