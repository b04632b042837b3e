"""A directory tree of adapters in which symlinks lead only to allowed places; the opened file is the judged file.

Runs in the threads of `filesystem.py`. In go an adapter's name and perhaps a file; out come the names of the adapter's
files, or an open file. Every path is resolved here link by link, judged (`AdapterTree._judge`), and then opened.

A path could be exchanged between the judgement and the open. So each component of the real place is opened by itself
without following links: a component that has become a link fails. The kernel alone follows the operator's root: links
of `/proc`, such as `/proc/PID/root`, have a text that leads elsewhere.
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
_LINKS = 40  # as the kernel
# On Linux, O_PATH also opens a directory without the right to list the directory.
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of the system where a former directory or file is a symlink now.
_EXCHANGED = frozenset({errno.ELOOP, errno.ENOTDIR})
# Whether links may make the adapter at a path below the root (second argument) the adapter of a name (first).
MayLead = Callable[[str, str], bool]


def anywhere(name: str, place: str) -> bool:  # noqa: ARG001 - a `MayLead`
    return True


def is_neighbour(name: str, place: str) -> bool:
    return os.path.dirname(name) == os.path.dirname(place)


class LeadsElsewhere(AdapterNotFound):
    """Links make another adapter this adapter, without permission."""


class AdapterTree:
    """Adapters below `root`; links may lead below `link_roots` too, where `may_lead` decides as below `root`."""

    def __init__(self, root: Path, may_lead: MayLead, link_roots: Sequence[Path]) -> None:
        self.root, self._may_lead = root, may_lead
        self._link_roots = link_roots
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
            names = {*_names_in(at), TOOLS_FILE}
            # Files for chats are optional: without links that lead nowhere, and files that this user may not read.
            unread = {file for file in names.intersection(CHAT_FILES) if not os.access(file, os.R_OK, dir_fd=at)}
            unread |= {file for file in names & MINOR_FILES - unread if not self.may_serve(name, file)}
            return choose_files(names - unread)

    def foreign(self, name: AdapterName) -> AdapterNotFound | None:
        """The error for a directory without an adapter's files, in which are another program's; None without these.

        Raises:
            OSError, InvalidAdapter, LeadsElsewhere: as `present`.
        """
        with closing(self._open(name, _PATH_ONLY)) as at:
            names = _names_in(at)
        if self.may_serve(name, DEFAULT):
            names.append(DEFAULT)
        at_place = {"adapter": str(name), "file": CONFIG_FILE, "place": str(self.root / str(name))}
        error = AdapterNotFound("no such file", expected="the file", **at_place)
        name_format(error, names)
        return error if error.remedy else None

    @contextlib.contextmanager
    def opened(self, name: AdapterName, file: str) -> Iterator[BinaryIO]:
        """One of an adapter's files; callers ask the opened file, never the path, for status and content.

        Raises:
            LoRAPluginsError: the file is missing or no regular file, or links lead to a forbidden place.
        """
        path = self.root / str(name) / file
        with open_regular(path, opener=lambda _, flags: self._open(name, flags, file)) as (opened, _):
            yield opened

    def may_serve(self, name: AdapterName, file: str = "") -> bool:
        """Whether the adapter's directory, or `file` in it, is there, and links lead to no forbidden place."""
        try:
            with closing(self._open(name, _PATH_ONLY, file)) as opened:
                return not file or stat.S_ISREG(os.fstat(opened).st_mode)
        except (OSError, LoRAPluginsError):
            return False

    def _open(self, name: AdapterName, flags: int, file: str = "") -> int:
        """Open the adapter's directory, or one of its files, for the caller to close.

        Raises:
            OSError: the path does not exist, or cannot be read.
            InvalidAdapter, LeadsElsewhere: links lead to a forbidden place.
        """
        judge = partial(self._judge, name, file=file) if self._is_judged else None
        return open_real(str(self.root), f"{name}/{file}", flags, judge)

    def _judge(self, name: AdapterName, real: RealPlace, *, file: str) -> None:
        """Refuse a place outside the root, and a place where links of this name may not lead.

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
        # The place decides as a name would: by the path below the root, without the folders in which Kubernetes keeps a
        # volume's files (..data, ..2026_11_27): no name can have them, so they are the adapter's own.
        place = "/".join(folder for folder in path.split("/") if not folder.startswith(".."))
        if place != str(name) and not self._may_lead(str(name), place):
            raise LeadsElsewhere(f"a link that leads to '{place}', which not everybody may use who may use this name")

    def _below_link_root(self, real: str) -> str | None:
        """Return the path below the nearest link root; None where it is below none."""
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
