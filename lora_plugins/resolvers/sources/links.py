"""Open a path below a root, once its real place is judged; the opened file is the judged file.

A path could be exchanged between the judgement and the open. So each component of the real place is opened by itself
without following links: a component that has become a link fails. The kernel alone follows the operator's root: links
of `/proc`, such as `/proc/PID/root`, have a text that leads elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lora_plugins.adapter.files import is_below
from lora_plugins.errors import SourceUnavailable

_ATTEMPTS = 5
_LINKS = 40  # as the kernel
# On Linux, O_PATH also opens a directory without the right to list the directory.
PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of the system where a former directory or file is a symlink now.
_EXCHANGED = frozenset({errno.ELOOP, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class RealPlace:
    """Where links lead: `path` is below the root if `is_inside`, and else below `/`."""

    path: str
    is_inside: bool


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Inside, a descriptor is open."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_real(root: str, below: str, flags: int, judge: Callable[[RealPlace], None] | None) -> int:
    """A new descriptor of the target of the path `below` the root, once `judge` accepts its place; waits for no pipe.

    Without `judge` links may lead anywhere, and the kernel follows them.

    Raises:
        OSError: the target does not exist, or cannot be opened.
        SourceUnavailable: each try met an exchange between the check and the open.
        Exception: any error of `judge`.
    """
    if judge is None:
        return os.open(os.path.join(root, below), flags | os.O_NONBLOCK | os.O_CLOEXEC)
    with closing(os.open(root, PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
        for _ in range(_ATTEMPTS):
            place = real_place(root, top, below)
            judge(place)
            try:
                return _open_without_links(place, flags, top)
            except OSError as error:
                if error.errno not in _EXCHANGED:
                    raise
    raise SourceUnavailable(
        "a path that is exchanged while it is opened",
        expected="files that stay for as long as it takes to read them",
        remedy="publish adapters by renaming a complete directory into place, or exchanging one link for another",
    )


def real_place(root: str, top: int, below: str) -> RealPlace:
    """Follow the links of a path below a root, which is open as `top`; a link may name the root by its path.

    Raises:
        OSError: the path does not exist, or its links lead in a circle.
    """
    top_path = os.path.realpath(root)
    done: list[str] = []
    rest, links = below.split("/"), 0
    while rest:
        part = rest.pop(0)
        if part in ("", "."):
            continue
        if part == ".." and done:
            done.pop()
            continue
        target = os.path.dirname(top_path) if part == ".." else _target("/".join((*done, part)), top)
        if target is None:
            done.append(part)
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), below)
        rest = [*target.split("/"), *rest]
        if target.startswith("/"):
            path, done = "/".join(rest), []
            within = next((at for at in (root, top_path) if _is_text_below(path, at)), None)
            if within is None:
                path, within = os.path.realpath(path, strict=True), top_path
                if not is_below(path, top_path):
                    return RealPlace(path, is_inside=False)
            rest = path[len(within) :].split("/")
    return RealPlace("/".join(done), is_inside=True)


def _is_text_below(path: str, top: str) -> bool:
    """Whether the text of `path` begins with `top`, as a path."""
    return f"{path}/".startswith(top.rstrip("/") + "/")


def _target(path: str, top: int) -> str | None:
    try:
        return os.readlink(path, dir_fd=top)
    except OSError as error:
        if error.errno == errno.EINVAL:  # no link
            return None
        raise


def _open_without_links(place: RealPlace, flags: int, top: int) -> int:
    *folders, last = [part for part in place.path.split("/") if part] or ["."]
    at = os.dup(top) if place.is_inside else os.open("/", PATH_ONLY | os.O_DIRECTORY | NO_LINK)
    try:
        for folder in folders:
            below = os.open(folder, PATH_ONLY | os.O_DIRECTORY | NO_LINK, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: opening a pipe for reading would wait for a writer.
        opened = os.open(last, flags | os.O_NONBLOCK | NO_LINK, dir_fd=at)
    finally:
        os.close(at)
    if stat.S_ISLNK(os.fstat(opened).st_mode):  # with O_PATH, O_NOFOLLOW opens the link itself instead of failing
        os.close(opened)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place.path)
    return opened
