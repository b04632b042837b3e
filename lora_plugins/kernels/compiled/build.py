"""Loading what `lora.c` and `copy.c` compile to: as the wheel brings it, or made for this machine, in every process.

A wheel has objects for levels of processors (`prebuilt.py`). Where there are none, or none that can be used, it is
compiled, once for each dtype, and nothing is kept: a library found in a cache would be somebody's code to run, made for
somebody's processor. vLLM's CPU platform too expects a compiler, wherever it compiles models.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from lora_plugins.kernels.compiled import library, prebuilt
from lora_plugins.kernels.compiled.library import Copy, Product
from lora_plugins.kernels.processor import this_processor
from lora_plugins.log import logger

SOURCE = prebuilt.SOURCES["float32"]
COMPILERS = ("cc", "gcc", "clang")
ELEMENTS = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}  # dtypes, as lora.c names them
ANY_PROCESSOR = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
FLAGS = (*ANY_PROCESSOR, "-march=native")
TIMEOUT_S = 60


class CannotCompile(Exception):
    """There is no compiled product on this machine; says why in one line."""


@functools.cache
def _outcome(kind: str) -> Product | Copy | str:
    load = library.load_copy if kind == prebuilt.COPY else library.load
    why_not = ""
    try:
        file = prebuilt.find(kind, this_processor())
        if file is not None:
            found = load(file)
            logger.info("CPU kernels: %s from %s, built with the package", kind, file.name)
            return found
    except (prebuilt.Unusable, OSError, AttributeError) as error:
        why_not = f"the package's own objects cannot be used: {error}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if why_not:
        instead = f"compiling with {compiler}" if compiler else "and there is no compiler"
        logger.warning("CPU kernels: %s: %s; %s", kind, why_not, instead)
    if compiler is None:
        no_compiler = f"no C compiler is on the PATH ({', '.join(COMPILERS)})"
        return f"{no_compiler}, and {why_not}" if why_not else no_compiler
    try:
        with tempfile.TemporaryDirectory(prefix="lora-plugins-") as directory:
            return _compiled(compiler, kind, Path(directory) / "lora.so", load)
    except OSError as error:
        return f"there is no temporary directory to compile in: {error}"


def _compiled(compiler: str, kind: str, file: Path, load: Callable[[Path], Product | Copy]) -> Product | Copy | str:
    try:
        done = subprocess.run(  # noqa: S603 - the machine's compiler, our source
            [compiler, *FLAGS, *defines(kind), str(prebuilt.SOURCES[kind]), "-o", str(file)],
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} did not run: {error}"
    if done.returncode:
        return f"{compiler} failed: {_first_error(done.stderr)}"
    try:
        return load(file)
    except OSError as error:
        return f"what {compiler} made cannot be loaded from TMPDIR (is it mounted noexec?): {error}"


def defines(kind: str) -> tuple[str, ...]:
    """What the compiler must be told for this kind of object."""
    return () if kind == prebuilt.COPY else (f"-DELEMENT={ELEMENTS[kind]}",)


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


def problem(dtype: str = "float32") -> str | None:
    """Why there is no compiled product here, in one line; None where there is one. The first call may compile."""
    outcome = _outcome(dtype)
    return outcome if isinstance(outcome, str) else None


def product(dtype: str = "float32") -> Product:
    """The compiled product of this process for `float32`, `bfloat16` or `float16`.

    Raises:
        CannotCompile: there is none.
    """
    outcome = _outcome(dtype)
    if isinstance(outcome, Product):
        return outcome
    raise CannotCompile(outcome)


def copy() -> Copy | None:
    """What copies blocks into a slot (`copy.c`), None where there is neither an object nor a compiler."""
    outcome = _outcome(prebuilt.COPY)
    return None if isinstance(outcome, str | Product) else outcome
