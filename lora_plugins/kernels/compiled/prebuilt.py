"""Objects of `lora.c` in a wheel, so that no compiler is needed; pure. `build.py` asks `find` for the object to load.

`tools/build_wheel.py` compiles the objects, for the levels of processors below, into `prebuilt/` of the wheel; a source
distribution or an editable installation has none. Only a file that `objects.json` lists with its digest, made of the
C files beside, is ever loaded: a truncated or foreign file can end the process when mapped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.kernels.processor import AMX_BF16, ARM_BF16, AVX512_BF16, X86_64_V3, X86_64_V4, Processor

FOLDER = Path(__file__).with_name("prebuilt")
LIST = "objects.json"
DTYPES = ("float32", "bfloat16", "float16")
SOURCE = Path(__file__).with_name("lora.c")
HEADERS = ("amx.h", "elements.h")


class Unusable(Exception):
    """The installed objects cannot be used; says why in one line."""


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of processor with objects of its own.

    Attributes:
        name: in the objects' names.
        architecture, flags: the processor's architecture, and the flags that the processor must have.
        compiler_flags: for GCC and clang. dtypes: dtypes of the objects that gain by the level.
    """

    name: str
    architecture: str
    flags: frozenset[str]
    compiler_flags: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES

    def file_name(self, dtype: str) -> str:
        return f"lora-{self.name}-{dtype}.so"


# `lora.c` uses AMX only where the definition says so: a processor's flags alone are no permission of the system's.
AMX = ("-mamx-tile", "-mamx-bf16", "-DAMX")
# The best first.
LEVELS = (
    Level(
        "x86-64-v4-amx",
        "x86_64",
        X86_64_V4 | AVX512_BF16 | AMX_BF16,
        ("-march=x86-64-v4", "-mavx512bf16", *AMX),
        dtypes=("bfloat16",),
    ),
    Level(
        "x86-64-v4-bf16", "x86_64", X86_64_V4 | AVX512_BF16, ("-march=x86-64-v4", "-mavx512bf16"), dtypes=("bfloat16",)
    ),
    Level("x86-64-v4", "x86_64", X86_64_V4, ("-march=x86-64-v4",)),
    Level("x86-64-v3", "x86_64", X86_64_V3, ("-march=x86-64-v3",)),
    Level("aarch64-bf16", "aarch64", ARM_BF16, ("-march=armv8.2-a+bf16",), dtypes=("bfloat16",)),
    Level("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
)


def level(dtype: str, processor: Processor) -> Level | None:
    """Return the best level that this processor has, or None."""
    for one in LEVELS:
        if dtype in one.dtypes and one.architecture == processor.architecture and processor.has(one.flags):
            return one
    return None


def find(dtype: str, processor: Processor) -> Path | None:
    """Return the unchanged object of this dtype for this processor; None where no objects were installed.

    Raises:
        Unusable: objects were installed, and none can be used here.
    """
    if not FOLDER.is_dir():
        return None
    # The digests catch a damaged file before the file is mapped: a truncated library ends the process with SIGBUS.
    wanted = level(dtype, processor)
    if wanted is None:
        levels = ", ".join(level.name for level in LEVELS)
        raise Unusable(f"this processor ({processor.architecture}) has none of the levels {levels}")
    file = FOLDER / wanted.file_name(dtype)
    try:
        listed = json.loads((FOLDER / LIST).read_bytes())
        # The list names the digest of the source too: after an edit of a C file the objects are stale.
        made_of, digest = listed["source"], listed["objects"][file.name]
        found = digest_of(file)
        own = digest_of_source()
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Unusable(f"{file.name} or its entry in {LIST} cannot be read ({why})") from error
    if made_of != own:
        raise Unusable(f"{file.name} was made of another {SOURCE.name} than the one installed")
    if found != digest:
        raise Unusable(f"{file.name} is not the file that was built (its digest differs from the one in {LIST})")
    return file


def digest_of_source() -> str:
    """SHA-256 of the digests of `lora.c` and its headers."""
    files = (SOURCE, *map(SOURCE.with_name, HEADERS))
    return hashlib.sha256("".join(map(digest_of, files)).encode()).hexdigest()


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
