"""A directory tree of adapters in which symlinks lead only to allowed places."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.files import is_below, open_regular
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.writers import DEFAULT, name_format
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError
from lora_plugins.resolvers.sources.links import NO_LINK, PATH_ONLY, RealPlace, closing, open_real
from lora_plugins.resolvers.sources.source import OWN_FILES, choose_files, needs_shards

# Whether links may make the adapter at a path below the root (second argument) the adapter of a name (first).
MayLead = Callable[[str, str], bool]


def anywhere(name: str, place: str) -> bool:  # noqa: ARG001 - a `MayLead`
    """Allow every place below the root."""
    return True


def is_neighbour(name: str, place: str) -> bool:
    """Allow places in the same folder."""
    return os.path.dirname(name) == os.path.dirname(place)


class LeadsElsewhere(AdapterNotFound):
    """Links make another adapter this adapter, without permission."""


class AdapterTree:
    """Adapters below `root`; links may lead below `link_roots`, and with `follow_symlinks` anywhere.

    Below `root` and `link_roots`, `may_lead` decides.
    """

    def __init__(
        self, root: Path, *, follow_symlinks: bool, may_lead: MayLead, link_roots: Sequence[Path] = ()
    ) -> None:
        self.root, self._link_roots = root, link_roots
        self.follows = follow_symlinks
        self._may_lead = may_lead

    def present(self, name: AdapterName) -> list[str] | None:
        """The names of the adapter's files in its directory; None where the path is no directory.

        Raises:
            OSError: the path does not exist, or cannot be read.
            InvalidAdapter, LeadsElsewhere: links lead to a forbidden place.
        """
        with closing(self._open(name, PATH_ONLY)) as at:
            if not stat.S_ISDIR(os.fstat(at).st_mode):
                return None
            present = [file for file in OWN_FILES if _is_in(at, file)]
            # Optional, so without links that lead nowhere and without files that this user may not read.
            optional = [file for file in CHAT_FILES if os.access(file, os.R_OK, dir_fd=at)]
            names = present
            # Listing needs the right to read, which the looks above do not: denied is not the same as absent.
            if needs_shards(present) or not present:
                names = _names_in(at)
            elif present == [CONFIG_FILE]:
                with contextlib.suppress(PermissionError):
                    names = _names_in(at)
            return choose_files({*names}.difference(CHAT_FILES).union(optional))

    def foreign(self, name: AdapterName) -> AdapterNotFound | None:
        """The error for a directory without an adapter's files, in which are another program's; None without these.

        Raises:
            OSError, InvalidAdapter, LeadsElsewhere: as `present`.
        """
        with closing(self._open(name, PATH_ONLY)) as at:
            names = _names_in(at)
            folder, file = os.path.split(DEFAULT)
            with (
                contextlib.suppress(OSError),
                closing(os.open(folder, PATH_ONLY | os.O_DIRECTORY | NO_LINK, dir_fd=at)) as below,
            ):
                names += [DEFAULT] if _is_in(below, file) else []
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

    def may_serve(self, name: AdapterName) -> bool:
        """Whether the adapter's directory is there, and links lead to no forbidden place."""
        try:
            os.close(self._open(name, PATH_ONLY))
        except (OSError, LoRAPluginsError):
            return False
        return True

    def _open(self, name: AdapterName, flags: int, file: str = "") -> int:
        """Open the adapter's directory, or one of its files, for the caller to close.

        Raises:
            OSError: the path does not exist, or cannot be read.
            InvalidAdapter, LeadsElsewhere: links lead to a forbidden place.
        """
        is_judged = not (self.follows and self._may_lead is anywhere)
        judge = partial(self._judge, name, is_file=bool(file)) if is_judged else None
        return open_real(str(self.root), f"{name}/{file}", flags, judge)

    def _judge(self, name: AdapterName, real: RealPlace, *, is_file: bool) -> None:
        """Refuse a place outside the root, and a place where links of this name may not lead.

        Raises:
            InvalidAdapter, LeadsElsewhere: the place is refused.
        """
        path = real.path if real.is_inside else self._below_link_root(real.path)
        if path is not None:
            folders = (os.path.dirname(path) if is_file else path).split("/")
            # The place decides as a name would: by the path below the root, without the folders in which Kubernetes
            # keeps a volume's files (..data, ..2026_11_27): no name can have them, so they are the adapter's own.
            place = "/".join(folder for folder in folders if not folder.startswith(".."))
            if place != str(name) and not self._may_lead(str(name), place):
                raise LeadsElsewhere(
                    f"a link that leads to '{place}', which not everybody may use who may use this name"
                )
        elif not self.follows:
            kind = "file" if is_file else "directory"
            raise InvalidAdapter(
                "a symlink that leaves the adapter root",
                expected=f"a {kind} below the root",
                remedy=f"copy the {kind} there, set LORA_PLUGINS_LINK_ROOTS, or LORA_PLUGINS_FOLLOW_SYMLINKS=1",
            )

    def _below_link_root(self, real: str) -> str | None:
        tops = (os.path.realpath(top) for top in self._link_roots)
        return next((real[len(top) :].lstrip("/") for top in tops if is_below(real, top)), None)


def _is_in(directory: int, name: str) -> bool:
    """Whether an open directory has an entry of this name, dangling links included."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _names_in(directory: int) -> list[str]:
    with closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)) as listed:
        return os.listdir(listed)
