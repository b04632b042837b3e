"""The symlink that a local path template asks for: from a readable path to the adapter's directory in the store."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.log import logger
from lora_plugins.store.layout import is_digest


@dataclass(frozen=True, slots=True)
class LocalLink:
    """A path below a fixed root that is to be a symlink to an adapter; what is not ours there is left alone."""

    root: str
    path: str

    def point_to(self, directory: Path, name: str) -> None:
        """Replace an earlier link at once; where that cannot be, log why, with the adapter's name."""
        try:
            refusal = self._point_to(directory)
        except OSError as error:
            refusal = error.strerror or type(error).__name__
        if refusal is not None:
            logger.warning("Adapter '%s': %s is not made a link to the adapter: %s", name, ascii(self.path), refusal)

    def _point_to(self, directory: Path) -> str | None:
        """Returns why it was left alone."""
        os.makedirs(self.root, exist_ok=True)
        *folders, last = [part for part in self.path[len(self.root) :].split("/") if part]
        if not self.path.startswith(self.root) or ".." in (*folders, last):
            return "it leaves the template's fixed beginning"
        with contextlib.ExitStack() as stack:
            at = _open_directory(self.root, None)
            stack.callback(os.close, at)
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=at)
                try:
                    at = _open_directory(folder, at)
                except PermissionError:
                    raise
                except OSError:
                    return f"'{folder}' on its way is a link or a file"
                stack.callback(os.close, at)
            return _replace_link(last, directory, at)


def _replace_link(name: str, directory: Path, at: int) -> str | None:
    try:
        target = os.readlink(name, dir_fd=at)
    except FileNotFoundError:
        target = None
    except OSError:
        return "a directory or file that is not ours stands there"
    if target == str(directory):
        return None
    if target is not None and not is_digest(os.path.basename(target)):
        return "a link that is not ours stands there"
    # In the same directory, so that the replacement is one rename; led by a dot, which no adapter name is.
    fresh = f".{os.urandom(8).hex()}.link"
    os.symlink(directory, fresh, dir_fd=at)
    try:
        os.replace(fresh, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError as error:
        os.unlink(fresh, dir_fd=at)
        if isinstance(error, IsADirectoryError):
            return "a directory that is not ours stands there"
        raise
    return None


def _open_directory(path: str, at: int | None) -> int:
    # The root may be reached through symlinks, which the operator made; nothing below it is followed.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if at is None else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=at)
