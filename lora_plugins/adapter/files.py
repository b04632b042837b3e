"""Opens and parses users' files: regular files only, with the system's errors mapped to ours, and JSON within bounds.

Called wherever a file is not our own: in the reading process, in the API server's sources, and on the command line. In
go paths, bytes and OSErrors; out come open files, parsed values, or an error of ours.

`json.loads` takes a hundred times a text's size in memory for a text full of small values, and holds the interpreter's
lock until the end. So values are counted and depth is measured before a parser builds any value. Both bounds are far
above any real file: a list of every expert of Kimi K2, with a rank and an alpha for each, has 210,000 values at a depth
of 2.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable, describing

# The system's errors for "there is no such file", whatever the reason.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})

MAX_VALUES = 1_000_000
MAX_DEPTH = 100

_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


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


def size_at(path: Path) -> int | None:
    """The size in bytes of what lies at `path` itself, a symlink too; None where nothing lies there.

    Raises:
        SourceUnavailable: the file system denies or fails, which does not show that nothing lies there.
    """
    try:
        return os.lstat(path).st_size
    except OSError as error:
        if error.errno in ABSENT:
            return None
        with describing(file=path.name):
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


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text, which `check_json` bounds before.

    Raises:
        ValueError: the text is no JSON, or is over a bound; says why.
    """
    check_json(data)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"text that stops being UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"text that stops being JSON at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError):
        raise ValueError("JSON that nests too deep or holds a number too long") from None


def check_json(data: bytes) -> None:
    """Refuse a text with too many values, or nested too deep; a text that is no JSON may pass.

    Raises:
        ValueError: the text is over a bound; names the bound.
    """
    # Each value but the first stands behind one of these marks. Marks in texts count as well, which saves reading
    # texts.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"JSON of more than {MAX_VALUES} values")
    # Texts are cut out first: a bracket in a text opens nothing.
    depth = 0
    for bracket in _BRACKETS.finditer(_TEXTS.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON that nests too deep, by more than {MAX_DEPTH}")
