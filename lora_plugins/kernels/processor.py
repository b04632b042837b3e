"""This machine's processor: its instructions, and from how many rows on PyTorch's bfloat16 is faster; pure.

PyTorch hands bfloat16 to oneDNN, which multiplies with the processor's own instructions where there are any. The
compiled product sums in float32 registers, or with AVX-512 BF16. With AVX-512 BF16 PyTorch's were 1.15 to 27 times
slower than ours, with neither AMX nor bfloat16 instructions 4 to 120 times.

Sources: `benchmarks/kernels_rows.py` for processors with AVX2 (results/kernels_rows.json) and with AVX-512 BF16
(results/kernels_rows_avx512_bf16.json). With AMX: measured by the engine's owner on one machine in November 2026,
slower than oneDNN from about 16 rows for each adapter; without a raw result. ARM BF16: not measured; the number of rows
is the package's first value.
"""

from __future__ import annotations

import functools
import platform
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


@dataclass(frozen=True, slots=True)
class Processor:
    """The architecture (`x86_64`, `aarch64`, ...), and the instructions that programs may use."""

    architecture: str
    flags: frozenset[str] = frozenset()

    def has(self, flags: Iterable[str]) -> bool:
        return self.flags.issuperset(flags)

    @property
    def bfloat16(self) -> str | None:
        """The instructions that multiply bfloat16 here, None where the processor only sums float32."""
        if self.architecture == "x86_64" and self.has(AMX_BF16):
            return "AMX"
        if self.architecture == "x86_64" and self.has(X86_64_V4 | AVX512_BF16):
            return "AVX-512 BF16"
        if self.architecture == "aarch64" and self.has(ARM_BF16):
            return "ARM BF16"
        return None

    def description(self) -> str:
        """Return architecture and bfloat16 instructions, for results."""
        return f"{self.architecture}, {self.bfloat16 or 'without AVX-512 BF16 or AMX'}"


@functools.cache
def this_processor() -> Processor:
    """Return the processor of this process, without flags where the system does not tell the flags."""
    # Inside a sandbox /proc may be missing. Without flags no x86 object is used, and -march=native compiles.
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    return Processor(platform.machine(), flags_in(text))


def flags_in(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first processor in the text of /proc/cpuinfo: `flags` on x86, `Features` on ARM."""
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(values.split())
    return frozenset()


ROWS_OF_BFLOAT16 = {"AMX": 16, "ARM BF16": 32}


def torch_from_rows(dtype: str, processor: Processor | None = None) -> int | None:
    """Return the number of rows from which PyTorch computes an adapter; None means never.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        processor: this machine's by default.
    """
    if dtype != "bfloat16":
        return None
    return ROWS_OF_BFLOAT16.get((processor or this_processor()).bfloat16 or "")
