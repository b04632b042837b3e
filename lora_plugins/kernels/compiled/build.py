"""Loads the library of `lora.c`: an object from the wheel, or compiled for this machine, in every process.

A wheel has objects for levels of processors (`prebuilt.py`). Without a usable object, every process compiles `lora.c`
for each dtype, and keeps nothing: a library found in a cache would be somebody's code to run, made for somebody's
processor. vLLM's CPU platform expects a compiler too, wherever vLLM compiles models.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from lora_plugins.kernels.compiled import prebuilt
from lora_plugins.kernels.compiled.library import Product, product_of
from lora_plugins.kernels.processor import AMX_BF16, this_processor
from lora_plugins.log import logger

COMPILERS = ("cc", "gcc", "clang")
ELEMENTS = {"float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}  # dtypes, as lora.c names them
# Without -ffast-math: an overflow must stay an infinity, and NaN must stay NaN.
ANY_PROCESSOR = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
# GCC 12 tunes for Zen 4 as for a Zen without AVX-512: float32 with few rows then takes up to a third longer.
_TUNING = ("-mtune=generic",) if platform.machine() == "x86_64" else ()
FLAGS = (*ANY_PROCESSOR, "-march=native", *_TUNING)
# Seconds of a compiler run; a slow machine with a stalled disk must not hold up the start for ever.
TIMEOUT_S = 60


class CannotCompile(Exception):
    """There is no compiled product on this machine; says why in one line."""


@functools.cache
def problem() -> str | None:
    """Return in one line why there is no compiled product here, or None.

    Callers ask before the model's dtype is known, and in processes that compute nothing: where the wheel has no object,
    only an empty file is compiled.
    """
    # float32 stands for all dtypes: a processor of any level has an object of float32.
    found, why_not = _of_wheel("float32")
    try:
        if found is None:
            _compiled("-x", "c", "/dev/null")
    except CannotCompile as error:
        return f"{error}, and {why_not}" if why_not else str(error)
    return None


@functools.cache
def product(dtype: str) -> Product:
    """Return the compiled product of this process for `float32`, `bfloat16` or `float16`.

    Raises:
        CannotCompile: there is no product.
    """
    found, _ = _of_wheel(dtype)
    # -march=native does not ask the system whether AMX is allowed, and compilers before GCC 11 do not know AMX.
    amx = ("-DAMX",) if this_processor().has(AMX_BF16) else ()
    return found or product_of(_compiled(f"-DELEMENT={ELEMENTS[dtype]}", *amx, str(prebuilt.SOURCE)))


@functools.cache
def _of_wheel(dtype: str) -> tuple[Product | None, str]:
    """Return the wheel's product, or why the wheel's objects cannot be used; the reason is empty without objects."""
    try:
        file = prebuilt.find(dtype, this_processor())
        if file is None:
            return None, ""
        found = product_of(ctypes.CDLL(str(file)))
    except (prebuilt.Unusable, OSError, AttributeError) as error:
        why_not = f"the package's own objects cannot be used: {error}"
        instead = f"compiling with {_compiler()}" if _compiler() else "and there is no compiler"
        logger.warning("CPU kernels: %s: %s; %s", dtype, why_not, instead)
        return None, why_not
    logger.info("CPU kernels: %s from %s, built with the package", dtype, file.name)
    return found, ""


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compiled(*source: str) -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise CannotCompile(f"no C compiler is on the PATH ({', '.join(COMPILERS)})")
    try:
        with tempfile.TemporaryDirectory(prefix="lora-plugins-") as directory:
            # The file may go once the library is mapped: Linux keeps the mapping.
            return _compiled_to(Path(directory) / "lora.so", compiler, *source)
    except OSError as error:
        raise CannotCompile(f"there is no temporary directory to compile in: {error}") from error


def _compiled_to(file: Path, compiler: str, *source: str) -> ctypes.CDLL:
    try:
        done = subprocess.run(  # noqa: S603 - the machine's compiler, our source
            [compiler, *FLAGS, *source, "-o", str(file)],
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler} did not run: {error}") from error
    if done.returncode:
        raise CannotCompile(f"{compiler} failed: {_first_error(done.stderr)}")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        found = f"what {compiler} made cannot be loaded from TMPDIR (is it mounted noexec?)"
        raise CannotCompile(f"{found}: {error}") from error


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])
