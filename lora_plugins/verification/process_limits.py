"""The limits of memory, time and open files of a reading process, and the errors for a breach or a lack of them.

Both sides call these functions: `child.py` sets its own limits, `reading_process.py` waits for `wall_s`, and
`children.py` asks which adapters take long. In goes the adapter's directory, whose files' sizes decide.
"""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.files import open_regular
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, SourceUnavailable

MAX_MEMORY_BYTES = 2 << 30  # a header of 500,000 tensors takes half
_MEMORY = Path("/proc/meminfo")
MAX_FILES = 320  # `MAX_SHARDS` of weights, and a few
# Every expert of Kimi K2 takes 5 s, and the values of 8 GiB another 2 s, on a core of an AMD EPYC of 2021.
_CPU_S = 30.0  # seconds of a processor for any adapter
_CPU_BYTES_PER_S = 100e6  # and a second more for so many bytes
_READ_BYTES_PER_S = 10e6  # of a slow disk
_WAIT_S = 60.0  # for a busy machine
_LONG_BYTES = 512 << 20
_LONG_HEADER_BYTES = 512 << 10  # some 4,000 tensors


def cpu_s(directory: str) -> float:
    """Return the seconds of a processor that reading these files may take."""
    return _CPU_S + _size_bytes(directory) / _CPU_BYTES_PER_S


def wall_s(directory: str) -> float:
    """Return the seconds that reading may take on a slow disk and a busy machine."""
    return _WAIT_S + _CPU_S + _size_bytes(directory) / _READ_BYTES_PER_S


def too_much(found: str) -> InvalidAdapter:
    """Return the error of an adapter that breaks a limit of its reading process, or ends each process."""
    return InvalidAdapter(
        f"an adapter that {found}",
        expected=f"one that is read at once, in {MAX_MEMORY_BYTES >> 20} MiB of memory",
        remedy="save the adapter again with PEFT",
    )


def lacking(more_bytes: int = 0) -> SourceUnavailable | None:
    """Return the error that names what this process or its machine lacks for reading any adapter; None for nothing.

    A reading process raises its own limits to those that its starter allows, except of address space and stack.

    Args:
        more_bytes: memory beside `MAX_MEMORY_BYTES`.
    """
    max_bytes = MAX_MEMORY_BYTES + more_bytes
    soft, hard = 0, 1  # of `getrlimit`
    lacks = [
        f"{name} of {limit}"
        for name, which, least in (
            ("RLIMIT_DATA", hard, max_bytes),
            # RLIMIT_AS counts mapped files and libraries too, so more must be allowed.
            ("RLIMIT_AS", soft, max_bytes + MAX_MEMORY_BYTES),
            ("RLIMIT_STACK", soft, 1 << 20),  # bytes, with which Python's own limit of recursion comes first
            ("RLIMIT_NOFILE", hard, MAX_FILES),
            ("RLIMIT_CPU", hard, _CPU_S),
        )
        if 0 <= (limit := resource.getrlimit(getattr(resource, name))[which]) < least  # unlimited is -1
    ]
    free = re.search(r"^MemAvailable: *(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    if free is not None and int(free[1]) << 10 < max_bytes:
        lacks.append(f"{free[1]} kB of memory on this machine that nothing uses")
    if not lacks:
        return None
    return SourceUnavailable(
        f"too little to read an adapter with: {', '.join(lacks)}",
        expected=f"{max_bytes >> 20} MiB of memory, {MAX_FILES} files and {_CPU_S:.0f} s of a processor, or no limit",
        remedy="raise the limit where the server is started (ulimit, the job's or the container's), or free memory",
    )


def takes_long(directory: str) -> bool:
    """Whether reading these files takes tenths of a second or more: many tensors, or many bytes of values."""
    if _size_bytes(directory) > _LONG_BYTES:
        return True
    header_bytes = 0
    with suppress(LoRAPluginsError, OSError):  # reading the files reports every fault
        for name in os.listdir(directory):
            if name == CONFIG_FILE or name.endswith(".safetensors"):
                with open_regular(Path(directory, name)) as (file, size_bytes):
                    header_bytes += size_bytes if name == CONFIG_FILE else int.from_bytes(file.read(8), "little")
    return header_bytes > _LONG_HEADER_BYTES


def _size_bytes(directory: str) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:
        return 0
