"""Open files and directories where they really lie: the real path is judged, and then opened without any link.

A path that is checked and opened afterwards may have been exchanged in between. Here every component is opened by
itself, and one that has become a symlink fails, so what was opened is what was judged.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from lora_plugins.errors import SourceUnavailable

_ATTEMPTS = 5
# On Linux a directory that may not be listed can be opened too.
PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# What the system answers where a component that was a directory or file is a symlink now.
_EXCHANGED = frozenset({errno.ELOOP, errno.ENOTDIR})


def open_real(path: str, flags: int, judge: Callable[[str], None]) -> int:
    """A new descriptor of what `path` leads to, once `judge` has let its real path through; it never waits for a pipe.

    Raises:
        OSError: there is nothing, or it cannot be opened.
        SourceUnavailable: it was exchanged each time between the two.
        Exception: what `judge` raises.
    """
    for _ in range(_ATTEMPTS):
        real = os.path.realpath(path, strict=True)
        judge(real)
        try:
            return _open_without_links(real, flags)
        except OSError as error:
            if error.errno not in _EXCHANGED:
                raise
    raise SourceUnavailable(
        "a path that is exchanged while it is opened",
        expected="files that stay for as long as it takes to read them",
        remedy="publish adapters by renaming a complete directory into place, or exchanging one link for another",
    )


def _open_without_links(real: str, flags: int) -> int:
    *folders, last = [part for part in real.split("/") if part] or ["."]
    at = os.open("/", PATH_ONLY | os.O_DIRECTORY | _NO_LINK)
    try:
        for folder in folders:
            below = os.open(folder, PATH_ONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=at)
            os.close(at)
            at = below
        opened = os.open(last, flags | os.O_NONBLOCK | _NO_LINK, dir_fd=at)
    finally:
        os.close(at)
    if stat.S_ISLNK(os.fstat(opened).st_mode):  # with PATH_ONLY it is the link itself that is opened
        os.close(opened)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), real)
    return opened
