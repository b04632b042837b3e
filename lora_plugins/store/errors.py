"""What the store's own file system answers, as errors of ours."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lora_plugins.adapter.files import map_os_error
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, OutOfMemory, SourceUnavailable

# The system's ways of saying that there is no room.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FEW_INODES = 64  # an adapter takes some ten


class DamagedCopy(SourceUnavailable):
    """L006: what is in the store has other bytes than its digest says; it is not served."""

    @classmethod
    def of(cls, digest: str, then: str = "it is fetched again") -> Self:
        """Of this entry; `then` says what becomes of it."""
        return cls(
            f"a damaged copy in the store: the bytes of {digest[:12]} are not those of its digest, and {then}",
            expected="the bytes that were fetched",
            remedy="ask again, or put the adapter back where it came from; look for faults of the store's disk",
        )


class FullDisk(OutOfMemory):
    """L004: the file system below the store has no bytes or no inodes left, or a quota or a limit is reached."""


def is_damage(error: Exception) -> bool:
    """Whether what cannot be read of an entry is not there, or no file; else it cannot be read at the moment."""
    if isinstance(error, InvalidAdapter):
        return True
    return isinstance(error, OSError) and not isinstance(map_os_error(error), SourceUnavailable)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise what is inside, its OSErrors as ours.

    Raises:
        FullDisk: there is no room.
        SourceUnavailable: the store cannot be read or written.
    """
    try:
        yield
    except LoRAPluginsError:
        raise
    except OSError as error:
        if error.errno in FULL:
            lacks_inodes = _lacks_inodes(error)
            raise FullDisk(
                f"{'a disk without free inodes' if lacks_inodes else 'a full disk'} below the store ({error.strerror})",
                expected="inodes for the adapter's files" if lacks_inodes else "room for the adapter",
                remedy="remove files that nobody needs, or set LORA_PLUGINS_STORE_DIR"
                if lacks_inodes
                else "free space, or set LORA_PLUGINS_STORE_MAX_BYTES or LORA_PLUGINS_STORE_DIR",
            ) from error
        raise SourceUnavailable(
            f"a store that answers '{error.strerror or type(error).__name__}'",
            expected="a store that can be read and written",
            remedy="check LORA_PLUGINS_STORE_DIR, its mount and its permissions",
        ) from error


def _lacks_inodes(error: OSError) -> bool:
    """Whether a file could not be made for want of inodes; only what makes a file names one.

    Those of the files that were made before may be free again by now.
    """
    if error.errno != errno.ENOSPC or not isinstance(error.filename, (str, os.PathLike)):
        return False
    with contextlib.suppress(OSError, StopIteration):
        disk = os.statvfs(next(folder for folder in Path(error.filename).parents if folder.is_dir()))
        # File systems that make inodes as they are needed say 0 of 0.
        return disk.f_files > 0 and disk.f_favail < _FEW_INODES
    return False
