"""Compile what a launch would run for GPUs that are not here, by Triton's own path, and report what ptxas reports.

A launch is recorded, so types, alignment and constants are those of the call itself. Triton must not be in its
interpreter, so this needs a separate process (`python -m benchmarks.gpu.aot`).
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Compiled:
    """One kernel as one architecture would run it.

    Attributes:
        kernel: its name. architecture: 80, 90, 100. warps: of one program.
        registers: of one thread. spilled_bytes: stores and loads that registers had no room for. shared_bytes: of one
        program. narrow: global loads of 2 bytes, one element of half precision. wide: those of 16 bytes, asynchronous
        copies among them.
    """

    kernel: str
    architecture: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    narrow: int
    wide: int


def compile_launches(
    kernels: Iterable[JITFunction], launch: Callable[[], None], architectures: Iterable[int]
) -> list[Compiled]:
    """Run `launch` with every kernel recorded in place of run, and compile what was recorded.

    Raises:
        subprocess.CalledProcessError: ptxas refuses the code. RuntimeError: nothing was launched.
    """
    calls: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(_recorded(kernel, calls))
        launch()
    if not calls:
        raise RuntimeError("nothing was launched")
    return [_compile(*call, architecture) for call in calls for architecture in architectures]


@contextmanager
def _recorded(kernel: JITFunction, calls: list[Any]) -> Any:
    def record(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append((kernel, args, kwargs))

    kernel.run = record
    try:
        yield
    finally:
        del kernel.run


def _compile(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], architecture: int) -> Compiled:
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {**kwargs, "debug": False, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode}
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attrs)
    made = triton.compile(source, target=target, options=options.__dict__)
    ptx = made.asm["ptx"]
    registers, spilled = _ptxas(ptx, architecture)
    widths = [_load_bytes(line) for line in ptx.splitlines() if re.search(r"\bld\.global|cp\.async\.c[ag]", line)]
    return Compiled(
        kernel=kernel.__name__.strip("_"),
        architecture=architecture,
        warps=made.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=made.metadata.shared,
        narrow=widths.count(2),
        wide=widths.count(16),
    )


def _load_bytes(line: str) -> int:
    if "cp.async" in line:
        return int(re.findall(r"0x[0-9a-f]+|\d+", line.partition("],")[2].partition("],")[2])[0], 0)
    vector = re.search(r"\.v(\d)", line)
    bits = re.search(r"\.[bfus](\d+)\s", line)
    assert bits, line
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1)


@functools.cache
def _ptxas(ptx: str, architecture: int) -> tuple[int, int]:
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        said = subprocess.run(
            [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1]}", path, "-o", Path(folder, "kernel.cubin")],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers, said
    assert len(spills) == 2, said
    return int(registers[1]), sum(map(int, spills))
