"""How much memory and time a reading process may take."""

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
_STACK_BYTES = 1 << 20  # Python's own limit of recursion comes first
MAX_FILES = 320  # `MAX_SHARDS` of weights, and a few
# Every expert of Kimi K2 takes 5 s, and the values of 8 GiB another 2 s, on a core of an AMD EPYC of 2021.
# Seconds of a processor for any adapter, and bytes a second beyond; then bytes a second of a slow disk, and seconds of
# waiting for a busy machine.
_CPU_S = 30.0
_CPU_BYTES_PER_S = 100e6
_READ_BYTES_PER_S = 10e6
_WAIT_S = 60.0
_LONG_BYTES = 512 << 20
_LONG_HEADER_BYTES = 512 << 10  # some 4,000 tensors


def cpu_s(directory: str) -> float:
    """Return the seconds of a processor that reading these files may take."""
    return _CPU_S + _size_bytes(directory) / _CPU_BYTES_PER_S


def wall_s(directory: str) -> float:
    """Return the seconds that reading may take on a slow disk and a busy machine."""
    return _WAIT_S + _CPU_S + _size_bytes(directory) / _READ_BYTES_PER_S


def too_much_memory(more_bytes: int = 0) -> LoRAPluginsError:
    """Return the error of an adapter that has taken all its memory: `MAX_MEMORY_BYTES` and `more_bytes`.

    The adapter is at fault only where this process may have so much memory, and the machine has the memory.
    """
    max_bytes = MAX_MEMORY_BYTES + more_bytes
    return lack_of_memory(max_bytes) or InvalidAdapter(
        f"an adapter that takes more than {max_bytes >> 20} MiB of memory to read",
        expected="header and configuration of an adapter",
        remedy="save the adapter again with PEFT",
    )


def lack_of_memory(max_bytes: int = MAX_MEMORY_BYTES) -> SourceUnavailable | None:
    """Return an error that names the limit or the machine that keeps this process from so much memory, or None.

    The reading process sets RLIMIT_DATA itself, up to its hard limit.
    """
    for name, which, enough_bytes in (
        ("RLIMIT_DATA", 1, max_bytes),
        # RLIMIT_AS counts mapped files and libraries too, so more must be allowed.
        ("RLIMIT_AS", 0, max_bytes + MAX_MEMORY_BYTES),
        ("RLIMIT_STACK", 0, _STACK_BYTES),
    ):
        if 0 <= resource.getrlimit(getattr(resource, name))[which] < enough_bytes:  # unlimited is -1
            return too_low(name, f"{enough_bytes} bytes")
    found = re.search(r"^MemAvailable: *(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    if found is None or int(found[1]) << 10 >= max_bytes:
        return None
    return SourceUnavailable(
        f"{found[1]} kB of memory on this machine that nothing uses",
        expected=f"{max_bytes >> 10}, which reading an adapter may take",
        remedy="ask again once there is memory, or give the machine more",
    )


def too_low(name: str, wanted: str) -> SourceUnavailable:
    """Return the error that names a limit of the server's own process."""
    return SourceUnavailable(
        f"too low a limit of the server's own process: {name}",
        expected=f"{wanted}, or no limit",
        remedy="raise it where the server is started: ulimit, or the job's or the container's limits",
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
