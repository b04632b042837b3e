"""Whether others could exchange the store's content: owner and mode of the root, and of every directory above the root.

Trusted are this user and root; and, where this process makes files for its group (umask 002), the owner of a root that
the group shares. The owner of a mount point is not checked: container runtimes make volumes with other owners.
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


def close_to_others(root: Path) -> None:
    """Make a new root this user's alone, unless the umask gives new files to the group too (umask 002)."""
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
    """Read the umask; os.umask can only set, so for a moment other threads make files for this user alone."""
    found = os.umask(0o077)
    os.umask(found)
    return found
