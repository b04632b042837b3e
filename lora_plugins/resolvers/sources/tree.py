"""A directory tree of adapters in which symlinks lead only to allowed places; the opened file is the judged file.

Runs in the threads of `filesystem.py`. In go an adapter's name and perhaps a file; out come the names of the adapter's
files, or an open file. Every path is resolved here link by link, its real place is judged (`AdapterTree._judge`: may
this name's links lead there?), and the real place is then opened.

A path could be exchanged between the judgement and the open. So each component of the real place is opened by itself
without following links: the open of a component that has become a link fails. Only the path of the operator's root is
left to the kernel to follow: links of `/proc`, such as `/proc/PID/root`, have a text that leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lora_plugins.adapter.chat import CHAT_FILES, MINOR_FILES, TOOLS_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.files import is_below, open_regular
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.writers import DEFAULT, name_format
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, SourceUnavailable
from lora_plugins.resolvers.sources.source import choose_files

ANYWHERE = Path("/")
_ATTEMPTS = 5
_LINKS = 40  # links that one path may follow; the kernel has the same limit
# On Linux, O_PATH also opens a directory without the right to list the directory.
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of the system where a former directory or file is a symlink now.
_EXCHANGED = frozenset({errno.ELOOP, errno.ENOTDIR})
# Called with an adapter's name and the path below the root where its links lead: may clients of the name get the
# adapter there?
MayLead = Callable[[str, str], bool]


def anywhere(name: str, place: str) -> bool:  # noqa: ARG001 - a `MayLead`
    """Let the links of every name lead to every adapter."""
    return True


def is_neighbour(name: str, place: str) -> bool:
    """Let the links of a name lead to adapters in the same folder only."""
    return os.path.dirname(name) == os.path.dirname(place)


class LeadsElsewhere(AdapterNotFound):
    """An adapter's links lead to another adapter, to which `may_lead` does not let them lead."""


class AdapterTree:
    """Adapters below `root`; links may lead below `link_roots` too.

    `may_lead` decides about each path below `root`, or below a link root, where links lead.
    """

    def __init__(self, root: Path, may_lead: MayLead, link_roots: Sequence[Path]) -> None:
        self.root, self._may_lead = root, may_lead
        self._link_roots = link_roots
        # Where every place is allowed, no place is judged, and the kernel follows the links.
        self._is_judged = not (ANYWHERE in link_roots and may_lead is anywhere)

    def present(self, name: AdapterName) -> list[str] | None:
        """The names of the adapter's files in its directory; None where the path is no directory.

        Raises:
            OSError: the path does not exist, or cannot be read.
            InvalidAdapter, LeadsElsewhere: links lead to a forbidden place.
        """
        with closing(self._open(name, _PATH_ONLY)) as at:
            if not stat.S_ISDIR(os.fstat(at).st_mode):
                return None
            names = {*_names_in(at), TOOLS_FILE}  # the listing has no files of folders, so `unread` decides about this
            # Files for chats are optional: leave out files that are missing or that this user may not read, and minor
            # files whose links lead to a forbidden place.
            unread = {file for file in names.intersection(CHAT_FILES) if not os.access(file, os.R_OK, dir_fd=at)}
            unread |= {file for file in names & MINOR_FILES - unread if not self.may_serve(name, file)}
            return choose_files(names - unread)

    def foreign(self, name: AdapterName) -> AdapterNotFound | None:
        """The error for a directory that has another program's files and no adapter's; None without such files.

        Raises:
            OSError, InvalidAdapter, LeadsElsewhere: as `present`.
        """
        with closing(self._open(name, _PATH_ONLY)) as at:
            names = _names_in(at)
        if self.may_serve(name, DEFAULT):
            names.append(DEFAULT)
        at_place = {"adapter": str(name), "file": CONFIG_FILE, "place": str(self.root / str(name))}
        error = AdapterNotFound("no such file", expected="the file", **at_place)
        name_format(error, names)  # sets a remedy only where the files show the program
        return error if error.remedy else None

    @contextlib.contextmanager
    def opened(self, name: AdapterName, file: str) -> Iterator[BinaryIO]:
        """Open one of an adapter's files; callers ask the opened file, never the path, for status and content.

        Raises:
            LoRAPluginsError: the file is missing or no regular file, or links lead to a forbidden place.
        """
        path = self.root / str(name) / file
        with open_regular(path, opener=lambda _, flags: self._open(name, flags, file)) as (opened, _):
            yield opened

    def may_serve(self, name: AdapterName, file: str = "") -> bool:
        """Whether the adapter's directory, or the regular file `file` in it, is there, and at no forbidden place."""
        try:
            with closing(self._open(name, _PATH_ONLY, file)) as opened:
                return not file or stat.S_ISREG(os.fstat(opened).st_mode)
        except (OSError, LoRAPluginsError):
            return False

    def _open(self, name: AdapterName, flags: int, file: str = "") -> int:
        """Open the adapter's directory, or where `file` is not empty, a file in the directory, for the caller to close.

        Raises:
            OSError: the path does not exist, or cannot be read.
            InvalidAdapter, LeadsElsewhere: links lead to a forbidden place.
        """
        judge = partial(self._judge, name, file=file) if self._is_judged else None
        return open_real(str(self.root), f"{name}/{file}", flags, judge)

    def _judge(self, name: AdapterName, real: RealPlace, *, file: str) -> None:
        """Refuse a place below neither the root nor a link root, and a place that `may_lead` forbids to `name`.

        Raises:
            InvalidAdapter, LeadsElsewhere: the place is refused.
        """
        path = real.path if real.is_inside else self._below_link_root(real.path)
        if path is None:
            kind = "file" if file else "directory"
            raise InvalidAdapter(
                "a symlink that leaves the adapter root",
                expected=f"a {kind} below the root",
                remedy=f"copy the {kind} there, or name the place in LORA_PLUGINS_LINK_ROOTS",
            )
        if file:
            path = path.removesuffix(f"/{file}") if path.endswith(f"/{file}") else os.path.dirname(path)
        # The path below the root is compared as a name. Kubernetes keeps a volume's files in folders such as `..data`
        # and `..2026_11_27`, which no name can have: they are left out, as part of the adapter that they lie in.
        place = "/".join(folder for folder in path.split("/") if not folder.startswith(".."))
        if place != str(name) and not self._may_lead(str(name), place):
            raise LeadsElsewhere(f"a link that leads to '{place}', which not everybody may use who may use this name")

    def _below_link_root(self, real: str) -> str | None:
        """Return the path of `real` below the nearest link root; None where `real` is below no link root."""
        tops = (os.path.realpath(top) for top in self._link_roots)
        return min((real[len(top) :].lstrip("/") for top in tops if is_below(real, top)), key=len, default=None)


def _names_in(directory: int) -> list[str]:
    with closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)) as listed:
        return os.listdir(listed)


@dataclass(frozen=True, slots=True)
class RealPlace:
    """Where links lead: `path` is below the root if `is_inside`, and else below `/`."""

    path: str
    is_inside: bool


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close the file descriptor on exit."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_real(root: str, below: str, flags: int, judge: Callable[[RealPlace], None] | None) -> int:
    """Open the path `below` the root, links followed, once `judge` accepts the real place; returns the descriptor.

    Where `judge` is None, links may lead anywhere, and the kernel follows the links. The open of a pipe does not wait
    for a writer.

    Raises:
        OSError: the target does not exist, or cannot be opened.
        SourceUnavailable: each try met an exchange between the check and the open.
        Exception: any error of `judge`.
    """
    if judge is None:
        return os.open(os.path.join(root, below), flags | os.O_NONBLOCK | os.O_CLOEXEC)
    with closing(os.open(root, _PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
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
    """Follow the links of a path below a root, which is open as `top`.

    A link whose absolute path begins with the root's path, as given or as resolved, stays inside.

    Raises:
        OSError: the path does not exist, or its links lead in a circle.
    """
    top_path = os.path.realpath(root)
    done: list[str] = []  # the resolved parts below the root; `rest` has the parts that are left
    rest, links = below.split("/"), 0
    while rest:
        part = rest.pop(0)
        if part in ("", "."):
            continue
        if part == ".." and done:
            done.pop()
            continue
        # A `..` at the root itself leads to the folder of the root, as an absolute link would.
        target = os.path.dirname(top_path) if part == ".." else _target("/".join((*done, part)), top)
        if target is None:  # no link
            done.append(part)
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), below)
        rest = [*target.split("/"), *rest]
        if target.startswith("/"):
            path, done = "/".join(rest), []
            # Where the text does not show that the path is below the root, `realpath` resolves the whole path.
            within = next((at for at in (root, top_path) if _is_text_below(path, at)), None)
            if within is None:
                path, within = os.path.realpath(path, strict=True), top_path
                if not is_below(path, top_path):
                    return RealPlace(path, is_inside=False)
            rest = path[len(within) :].split("/")
    return RealPlace("/".join(done), is_inside=True)


def _is_text_below(path: str, top: str) -> bool:
    return f"{path}/".startswith(top.rstrip("/") + "/")


def _target(path: str, top: int) -> str | None:
    """Where a link leads; None for a path that is no link."""
    try:
        return os.readlink(path, dir_fd=top)
    except OSError as error:
        if error.errno == errno.EINVAL:  # no link
            return None
        raise


def _open_without_links(place: RealPlace, flags: int, top: int) -> int:
    """Open a place folder by folder, from the root (open as `top`) or from `/`; returns the descriptor.

    Raises:
        OSError: a part of the path is a link by now (an error of `_EXCHANGED`), does not exist or cannot be opened.
    """
    *folders, last = [part for part in place.path.split("/") if part] or ["."]
    at = os.dup(top) if place.is_inside else os.open("/", _PATH_ONLY | os.O_DIRECTORY | _NO_LINK)
    try:
        for folder in folders:
            below = os.open(folder, _PATH_ONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: opening a pipe for reading would wait for a writer.
        opened = os.open(last, flags | os.O_NONBLOCK | _NO_LINK, dir_fd=at)
    finally:
        os.close(at)
    if stat.S_ISLNK(os.fstat(opened).st_mode):  # with O_PATH, O_NOFOLLOW opens the link itself instead of failing
        os.close(opened)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place.path)
    return opened
