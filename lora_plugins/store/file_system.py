"""Whether a file system can hold the store: it is tried out, with the two things that the store's locks are made of.

`locks.py` takes the lock of a fetch by a hard link, which must fail where the lock is there; `leases.py` and the
takeover of a dead owner's lock hold file locks (`flock`, through `filelock`), which must exclude each other. What other
hosts see of them cannot be tried from here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from lora_plugins.errors import InvalidSettings

# What link and flock answer where the file system does not have them.
_MISSING = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOLCK})
_MOVE = "set LORA_PLUGINS_STORE_DIR to a local disk"


def try_file_system(probe: Path, link: Path) -> None:
    """Try it with two new files, which are removed again.

    Raises:
        InvalidSettings: there are no hard links or no working file locks.
        OSError: it cannot be written.
    """
    try:
        probe.touch()
        _try_links(probe, link)
        _try_locks(probe)
    finally:
        for path in (link, probe):
            with contextlib.suppress(OSError):
                path.unlink()


def _try_links(probe: Path, link: Path) -> None:
    try:
        os.link(probe, link)
    except OSError as error:
        if error.errno in _MISSING:
            raise _no_links(f"without hard links (link answers '{error.strerror}')") from error
        raise
    try:
        os.link(probe, link)
    except FileExistsError:
        return
    raise _no_links("whose hard links replace what is there")


def _no_links(found: str) -> InvalidSettings:
    return InvalidSettings(
        f"a store on a file system {found}",
        expected="hard links, which the store's locks need",
        remedy=f"{_MOVE}; FAT, exFAT and mounts of object stores have none",
    )


def _try_locks(probe: Path) -> None:
    with probe.open("rb") as one, probe.open("rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EACCES:  # another word for a lock that is held
                return
            if error.errno in _MISSING:
                raise _no_locks(f"without file locks (flock answers '{error.strerror}')") from error
            raise
    raise _no_locks("whose file locks let two in at once")


def _no_locks(found: str) -> InvalidSettings:
    return InvalidSettings(
        f"a store on a file system {found}",
        expected="working file locks",
        remedy=f"{_MOVE}, or mount it with locks (NFS with its lock service or version 4, Lustre with -o flock)",
    )
