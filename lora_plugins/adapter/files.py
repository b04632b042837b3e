"""Opens user-supplied files: regular files only, with the system's errors mapped to ours."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable, describing

# The system's errors for "there is no such file", whatever the reason.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


def is_below(real: str, top: str) -> bool:
    """Whether the real path `real` is `top`, or is below `top`."""
    return os.path.commonpath([real, top]) == top


def _open_without_waiting(path: str, flags: int) -> int:
    # Non-blocking: a named pipe is then refused by its kind, and nobody waits for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_regular(
    path: Path, *, opener: Callable[[str, int], int] = _open_without_waiting
) -> Iterator[tuple[BinaryIO, int]]:
    """Open `path` for reading, by `opener` as Python's `open` takes it, and yield it with its size in bytes.

    Raises:
        AdapterNotFound: there is no such file.
        InvalidAdapter: not a regular file.
        SourceUnavailable: the file system denies or fails, also while the caller reads.
    """
    with describing(file=path.name):
        try:
            # Python closes the opener's descriptor, also where Python refuses the descriptor afterwards (a directory).
            with open(path, "rb", opener=opener) as file:
                # Of the open descriptor, not of the path: the path may point to another file by now.
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise _not_regular()
                yield file, status.st_size
        except LoRAPluginsError:
            raise
        except OSError as error:
            raise map_os_error(error) from error


def map_os_error(error: OSError) -> LoRAPluginsError:
    """Return our error for an error of the file system."""
    if error.errno in ABSENT:
        return AdapterNotFound("no such file", expected="the file", remedy="save the adapter again with PEFT")
    if error.errno == errno.ELOOP:
        return InvalidAdapter(
            "symlinks that lead in a circle", expected="a file", remedy="copy the file in place of the symlink"
        )
    if error.errno in (errno.ENXIO, errno.EISDIR):
        return _not_regular()
    return SourceUnavailable(
        f"a file system that answers '{error.strerror or type(error).__name__}'",
        expected="a readable file",
        remedy="check permissions and mounts",
    )


def _not_regular() -> InvalidAdapter:
    return InvalidAdapter(
        "something that is not a regular file", expected="a file", remedy="copy the adapter again, without pipes"
    )
