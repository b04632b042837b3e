"""Errors of the store's own file system, as errors of this package.

Used around every access to the store: in goes an OSError, out comes a fault that passes (503 or 507), or the knowledge
that an entry is damaged. A fault is never taken for damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lora_plugins.adapter.files import map_os_error
from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, OutOfMemory, SourceUnavailable

# Answers of the system for "no room": a full disk, a quota, a limit of file sizes.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FEW_INODES = 64  # an adapter takes about ten


class DamagedCopy(SourceUnavailable):
    """L006: a copy in the store has other bytes than its digest says, and is not served."""

    @classmethod
    def of(cls, digest: str, then: str = "it is fetched again") -> Self:
        """The error for the entry `digest`; `then` says how the store goes on."""
        return cls(
            f"a damaged copy in the store: the bytes of {digest[:12]} are not those of its digest, and {then}",
            expected="the bytes that were fetched",
            remedy="ask again, or put the adapter back where it came from; look for faults of the store's disk",
        )


class FullDisk(OutOfMemory):
    """L004: the file system below the store has no bytes or no inodes left, or a quota is reached."""


def is_damage(error: Exception) -> bool:
    """Whether an entry's file is missing or malformed; False where the file cannot be read at the moment."""
    if isinstance(error, InvalidAdapter):
        return True
    return isinstance(error, OSError) and not isinstance(map_os_error(error), SourceUnavailable)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise OSErrors of the block as errors of this package.

    Raises:
        FullDisk: the file system has no room. OutOfMemory: a file would be larger than may be.
        SourceUnavailable: the store cannot be read or written.
    """
    try:
        yield
    except LoRAPluginsError:
        raise
    except OSError as error:
        if error.errno in FULL:
            lacks_inodes = _lacks_inodes(error)
            # Nothing that goes lets a file be larger.
            kind = OutOfMemory if error.errno == errno.EFBIG else FullDisk
            raise kind(
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
    """Whether making a file failed for want of inodes.

    Only calls that make a file put a file name into their error. By now inodes may be free again, because the
    failed call has removed files that it made before.
    """
    if error.errno != errno.ENOSPC or not isinstance(error.filename, (str, os.PathLike)):
        return False
    with contextlib.suppress(OSError, StopIteration):
        disk = os.statvfs(next(folder for folder in Path(error.filename).parents if folder.is_dir()))
        # File systems that make inodes on demand (btrfs) report 0 of 0.
        return disk.f_files > 0 and disk.f_favail < _FEW_INODES
    return False
