"""Compiling `lora.c` for this machine and loading it, in every process that asks.

It is done once for each dtype, and nothing is kept: a library found in a cache would be somebody's code to run,
made for somebody's processor. vLLM's CPU platform too expects a compiler, wherever it compiles models.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("lora.c")
COMPILERS = ("cc", "gcc", "clang")
ELEMENTS = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}  # dtypes, as lora.c names them
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
TIMEOUT_S = 60


class CannotCompile(Exception):
    """There is no compiled product on this machine; says why in one line."""


class Slice(ctypes.Structure):
    """`struct slice` of `lora.c`."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("top", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class Group(ctypes.Structure):
    """`struct group` of `lora.c`."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("n_slices", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
        ("shrunk", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Product:
    """The compiled product for one dtype of x, y and the weights.

    Attributes:
        add: `add(groups, n_groups, in, parts, scale, x, x_stride, y, y_stride)`, pointers and strides in elements;
            unchecked.
        parts: `parts(groups, n_groups, in)`, into how many parts the first product's sum is best divided; of each
            group's `shrunk` there are as many.
        pack: `pack(from, stride, columns, depth, panels, first, total)`, which writes columns into panels; unchecked.
        panel: columns of a full panel of A or B. lanes: columns of a narrow one, and what a panel is filled up to.
        pair: elements of one column that lie side by side in a panel.
        threads: `threads()`, how many it would use now.
    """

    add: Any
    parts: Any
    pack: Any
    threads: Callable[[], int]
    panel: int
    lanes: int
    pair: int


@functools.cache
def _outcome(dtype: str) -> Product | str:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"no C compiler is on the PATH ({', '.join(COMPILERS)})"
    try:
        with tempfile.TemporaryDirectory(prefix="lora-plugins-") as directory:
            loaded = _compiled(compiler, dtype, Path(directory) / "lora.so")
    except OSError as error:
        return f"there is no temporary directory to compile in: {error}"
    if isinstance(loaded, str):
        return loaded
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.lora_add.argtypes = [pointer, number, number, number, ctypes.c_float, pointer, number, pointer, number]
    loaded.lora_add.restype = None
    loaded.lora_parts.argtypes = [pointer, number, number]
    loaded.lora_pack.argtypes = [pointer, number, number, number, pointer, number, number]
    loaded.lora_pack.restype = None
    for count in (loaded.lora_parts, loaded.lora_threads, loaded.lora_panel, loaded.lora_lanes, loaded.lora_pair):
        count.restype = number
    return Product(
        loaded.lora_add, loaded.lora_parts, loaded.lora_pack, loaded.lora_threads,
        panel=loaded.lora_panel(), lanes=loaded.lora_lanes(), pair=loaded.lora_pair(),
    )  # fmt: skip


def _compiled(compiler: str, dtype: str, library: Path) -> ctypes.CDLL | str:
    try:
        done = subprocess.run(  # noqa: S603 - the machine's compiler, our source
            [compiler, *FLAGS, f"-DELEMENT={ELEMENTS[dtype]}", str(SOURCE), "-o", str(library)],
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} did not run: {error}"
    if done.returncode:
        return f"{compiler} failed: {_first_error(done.stderr)}"
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        return f"what {compiler} made cannot be loaded from TMPDIR (is it mounted noexec?): {error}"


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


def problem(dtype: str = "float32") -> str | None:
    """Why there is no compiled product here, in one line; None where there is one. The first call compiles."""
    outcome = _outcome(dtype)
    return outcome if isinstance(outcome, str) else None


def product(dtype: str = "float32") -> Product:
    """The compiled product of this process for `float32`, `bfloat16` or `float16`.

    Raises:
        CannotCompile: there is none.
    """
    outcome = _outcome(dtype)
    if isinstance(outcome, str):
        raise CannotCompile(outcome)
    return outcome
