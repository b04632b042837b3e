"""This machine's processor: the instructions that programs may use; pure.

Each process that may compute on the CPU asks once, before it compiles or loads the kernels (`compiled/build.py`).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Names as in /proc/cpuinfo; the levels are the levels of the x86-64 psABI.
X86_64_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
X86_64_V4 = X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AVX512_BF16 = frozenset({"avx512_bf16"})
AMX_BF16 = frozenset({"amx_tile", "amx_bf16"})
ARM_BF16 = frozenset({"bf16"})
# Linux, arch/x86/include/uapi/asm/prctl.h: since 5.16 a process asks for the registers of AMX before their first use.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Processor:
    """The architecture (`x86_64`, `aarch64`, ...), and the instructions that programs may use."""

    architecture: str
    flags: frozenset[str] = frozenset()

    def has(self, flags: Iterable[str]) -> bool:
        return self.flags.issuperset(flags)


@functools.cache
def this_processor() -> Processor:
    """Return the processor of this process, without flags where the system does not tell the flags.

    Where the processor has AMX, the process has the permission to use AMX afterwards.
    """
    # Inside a sandbox /proc may be missing. Without flags no x86 object is used, and -march=native compiles.
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    found = Processor(platform.machine(), flags_in(text))
    # A sandbox may refuse: the first instruction of AMX would end the process.
    if found.has(AMX_BF16) and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        return Processor(found.architecture, found.flags - AMX_BF16)
    return found


def flags_in(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first processor in the text of /proc/cpuinfo: `flags` on x86, `Features` on ARM."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split() if found else ())
