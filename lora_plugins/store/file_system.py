"""Try whether a file system can hold the store, and whether this user may share the store.

`locks.py` takes the lock of a fetch by a hard link, which must fail where the lock exists; `leases.py` and the
takeover of a dead owner's lock hold file locks (`flock`, through `filelock`), which must exclude each other. A trial
on this host cannot tell whether other hosts see the locks.

All users of a store change files that other users made: locks, leases, times of use. A user whose files the other
users could not change is refused at the start: otherwise requests of the others would fail later, one adapter after
the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from lora_plugins.errors import InvalidSettings
from lora_plugins.store.owners import has_default_acl, name_of

# Errors of link and flock on file systems without hard links or locks.
_MISSING = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOLCK})
_MOVE = "set LORA_PLUGINS_STORE_DIR to a local disk"


def try_file_system(probe: Path, link: Path, *, folder: Path | None) -> None:
    """Try links, locks and owners with two new files, which the function removes again.

    `folder` is a folder that the store's first user made; None where there is no store yet.

    Raises:
        InvalidSettings: there are no hard links or no working file locks, or other users of the store could not change
            files that this user makes there.
        OSError: the store cannot be written.
    """
    try:
        probe.touch()
        if folder is not None:
            _try_users(probe.stat(), folder)
        _try_links(probe, link)
        _try_locks(probe)
    finally:
        for path in (link, probe):
            with contextlib.suppress(OSError):
                path.unlink()


def _try_users(made: os.stat_result, folder: Path) -> None:
    """Compare a file of this process with the first user's folder: some file systems map all users to one user."""
    theirs = folder.stat()
    is_shared = stat.S_IWGRP & made.st_mode & theirs.st_mode and made.st_gid == theirs.st_gid
    is_everybodys = stat.S_IWOTH & made.st_mode & theirs.st_mode
    if made.st_uid == theirs.st_uid or is_shared or is_everybodys or has_default_acl(folder):
        return
    owner = name_of(theirs.st_uid)
    raise InvalidSettings(
        f"a store of user {owner}, who could not change what user {name_of(made.st_uid)} makes there",
        expected="one user, or several of one group with umask 002",
        remedy=(
            f"run this as {owner}, set LORA_PLUGINS_STORE_DIR, or share the store by a group: lora-plugins explain L007"
        ),
    )


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
    # Two descriptors of one file: flock excludes them even within a process, unlike POSIX record locks.
    with probe.open("rb") as one, probe.open("rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EACCES:  # some systems answer EACCES for a held lock
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
