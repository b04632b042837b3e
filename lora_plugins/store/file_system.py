"""Try whether a file system can hold the store, and whether this user may share the store.

Runs when a store is opened, in each process; in goes the root, out comes nothing, or an error that names a remedy.

Fetches and leases hold file locks (`flock`, through `filelock`), which must exclude each other. A trial on this host
cannot tell whether other hosts see the locks.

All users of a store change files that other users made: locks, leases, times of use. A user whose files the other users
could not change is refused at the start: otherwise requests of the others would fail later, one adapter after the
other.

Nor may others be able to exchange the store's content: owner and mode of the root, and of every directory above the
root, decide. Trusted are this user and root; and, where this process makes files for its group (umask 002), the owner
of a root that the group shares. The owner of a mount point is not checked: container runtimes make volumes with other
owners.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from lora_plugins.errors import InvalidSettings

# Errors of flock on file systems without locks.
_MISSING = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK})
_umask_is_read = threading.Lock()


def try_file_system(probe: Path, *, folder: Path | None) -> None:
    """Try locks and owners with a new file, which the function removes again.

    `folder` is a folder that the store's first user made; None where there is no store yet.

    Raises:
        InvalidSettings: there are no working file locks, or other users of the store could not change files that this
            user makes there.
        OSError: the store cannot be written.
    """
    try:
        probe.touch()
        if folder is not None:
            _try_users(probe.stat(), folder)
        _try_locks(probe)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _try_users(made: os.stat_result, folder: Path) -> None:
    """Compare a file of this process with the first user's folder: some file systems map all users to one user."""
    theirs = folder.stat()
    # Both directions: each user must be able to change the files of the other.
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
        remedy="set LORA_PLUGINS_STORE_DIR to a local disk, or mount it with locks (NFS with its lock service or "
        "version 4, Lustre with -o flock)",
    )


def check_owners(root: Path) -> None:
    """Check every existing part of the path to a store's root, and the root itself.

    Raises:
        InvalidSettings: another user owns a part of the path, or may exchange the part.
        OSError: the path cannot be examined, or the root is another user's and cannot be written.
    """
    trusted = {0, os.geteuid()}
    with contextlib.suppress(FileNotFoundError):
        there = root.stat()
        if there.st_uid not in trusted and not os.path.ismount(root) and _is_ours(root, there):
            trusted.add(there.st_uid)
    for path, found in _components(root):
        if os.path.ismount(path):
            continue
        if found.st_uid not in trusted:
            raise InvalidSettings(
                f"a store below {path}, which belongs to user {name_of(found.st_uid)}",
                expected=f"directories of user {name_of(os.geteuid())} or root: their owners can exchange the store",
                remedy=(
                    "set LORA_PLUGINS_STORE_DIR to a directory of this user, or share the store by a group: "
                    "lora-plugins explain L007"
                ),
            )
        # The sticky bit (as of /tmp) keeps other users from renaming; the mode of a link has no meaning on Linux.
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode):
            raise InvalidSettings(
                f"a store below {path}, where every user may exchange it",
                expected="directories in which others cannot rename what is not theirs",
                remedy=f"'chmod o-w {path}' (or +t), or set LORA_PLUGINS_STORE_DIR",
            )


def make_root(root: Path) -> None:
    """Make a new root, this user's alone unless umask or default ACL give new files to the group too (umask 002).

    The root has its mode from the start: the next start of a killed process takes the root as it is.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    is_shared = not _umask() & stat.S_IWGRP or has_default_acl(root.parent)
    root.mkdir(mode=0o777 if is_shared else 0o700, exist_ok=True)


def name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"{user}"


def has_default_acl(folder: Path) -> bool:
    """Whether the folder has a default ACL: new files then get their rights from the ACL, not from the umask."""
    try:
        return bool(os.getxattr(folder, "system.posix_acl_default"))
    except (OSError, AttributeError):  # no such list, or a system without ACLs
        return False


def _is_ours(root: Path, there: os.stat_result) -> bool:
    """Whether another user's root is shared with a group of this user, or its file system maps all users to one."""
    groups = {os.getegid(), *os.getgroups()}
    is_shared = bool(there.st_mode & stat.S_IWGRP) and there.st_gid in groups and not _umask() & stat.S_IWGRP
    if is_shared or has_default_acl(root):
        return True
    # Some mounts (CIFS, NFS with all_squash) show one owner for all users: make a file and look.
    probe = root / f".owner.{os.urandom(6).hex()}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_uid == there.st_uid
    finally:
        probe.unlink(missing_ok=True)


def _components(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The existing parts of the path, both as written and with links resolved; links are parts too."""
    written, real = Path(os.path.abspath(root)), Path(os.path.realpath(root))
    for path in dict.fromkeys((*reversed(written.parents), written, *reversed(real.parents), real)):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


def _umask() -> int:
    # `os.umask` can only set: for a moment, other threads make files for this user alone.
    with _umask_is_read:
        found = os.umask(0o077)
        os.umask(found)
    return found
