"""Whether others could exchange what the store holds: owner and mode of its root, and of every directory above it.

Trusted are this user and root; and, where this process makes files for its group (umask 002), the owner of a root that
is shared with that group. A mount point is whoever mounts it's business: in containers, volumes are made so.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from lora_plugins.errors import InvalidSettings


def check_owners(root: Path) -> None:
    """Look at what is there of the path to a store's root, the root too.

    Raises:
        InvalidSettings: somebody else owns a part of it, or may exchange it.
        OSError: it cannot be looked at, or is another's and cannot be written.
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
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode):
            raise InvalidSettings(
                f"a store below {path}, where every user may exchange it",
                expected="directories in which others cannot rename what is not theirs",
                remedy=f"'chmod o-w {path}' (or +t), or set LORA_PLUGINS_STORE_DIR",
            )


def close_to_others(root: Path) -> None:
    """Make a new root this user's alone, unless what this process makes is its group's too (umask 002)."""
    mode = stat.S_IMODE(root.stat().st_mode)
    if not mode & stat.S_IWGRP:
        root.chmod(mode & ~0o077)


def name_of(user: int) -> str:
    """A user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"{user}"


def has_default_acl(folder: Path) -> bool:
    """Whether the folder says itself who may change new files: then their modes do not."""
    try:
        return bool(os.getxattr(folder, "system.posix_acl_default"))
    except (OSError, AttributeError):  # there is none, or the system has no such lists
        return False


def _is_ours(root: Path, there: os.stat_result) -> bool:
    """Whether another's root is shared with a group of this user, or on a file system that makes all users one."""
    groups = {os.getegid(), *os.getgroups()}
    is_shared = bool(there.st_mode & stat.S_IWGRP) and there.st_gid in groups and not _umask() & stat.S_IWGRP
    if is_shared or has_default_acl(root):
        return True
    probe = root / f".owner.{os.urandom(6).hex()}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_uid == there.st_uid
    finally:
        probe.unlink(missing_ok=True)


def _components(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """What is there of the path as it is written and as it really is, links among it."""
    written, real = Path(os.path.abspath(root)), Path(os.path.realpath(root))
    for path in dict.fromkeys((*reversed(written.parents), written, *reversed(real.parents), real)):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


def _umask() -> int:
    """Read the umask; for the moment that takes, other threads make files for this user alone."""
    found = os.umask(0o077)
    os.umask(found)
    return found
