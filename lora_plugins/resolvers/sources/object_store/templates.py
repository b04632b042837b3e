"""URL and path templates of vLLM's documentation, and the links that a local path template asks for.

A template is text with the placeholders `{base_model_name}`, `{lora_name}` and `{revision}`, and nothing else of
`str.format`. What requests can choose stands behind a fixed beginning and never leaves it.
"""

from __future__ import annotations

import contextlib
import os
import string
from pathlib import Path
from urllib.parse import quote

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import InvalidSettings
from lora_plugins.store.layout import is_digest

DEFAULT_REVISION = "main"
_PLACEHOLDERS = ("base_model_name", "lora_name", "revision")
# What `uris.SourceUri` writes as it stands in a URL.
_PLAIN = "!$&'()*+,;=:~-._@/"


class Template:
    """A checked template; `variable` is the environment variable that it came from.

    Raises:
        InvalidSettings: an unknown placeholder, a conversion or format, or no `{lora_name}`.
    """

    def __init__(self, text: str, variable: str) -> None:
        self.text = text
        self._variable = variable
        try:
            self._parts = [self._part(*part) for part in string.Formatter().parse(text)]
        except InvalidSettings:
            raise
        except ValueError as error:
            raise self.wrong("unbalanced braces") from error
        used = {field for _, field in self._parts}
        if "lora_name" not in used:
            raise self.wrong("a template without {lora_name}")
        self.has_revision = "revision" in used
        self.fixed = self._parts[0][0]

    def fill(self, name: AdapterName, base_model_name: str, *, quoted: bool = False) -> str:
        """The text for an adapter; `quoted` percent-encodes what is filled in.

        A pinned revision becomes part of the name where the template has no place for it. Of the base model's name,
        which may be a path, what does not name anything (`/`, `.`, `..`) is left out.
        """
        values = {
            "base_model_name": "/".join(part for part in base_model_name.split("/") if part not in ("", ".", "..")),
            "lora_name": name.path if self.has_revision else str(name),
            "revision": name.revision or DEFAULT_REVISION,
        }
        return "".join(
            literal + ("" if field is None else quote(values[field], _PLAIN) if quoted else values[field])
            for literal, field in self._parts
        )

    def wrong(self, found: str) -> InvalidSettings:
        """An error about this template; the text itself is not repeated, it may hold a password."""
        return InvalidSettings(
            f"{found} in {self._variable}",
            expected="text with {base_model_name}, {lora_name} and {revision} behind a fixed beginning",
            remedy=f"correct {self._variable}",
        )

    def _part(
        self, literal: str, field: str | None, form: str | None, conversion: str | None
    ) -> tuple[str, str | None]:
        if field is not None and field not in _PLACEHOLDERS:
            raise self.wrong(f"the placeholder {{{field}}}")
        if form or conversion:
            raise self.wrong(f"a conversion of {{{field}}}")
        return literal, field


class LocalLinks:
    """Symlinks from templated local paths to store directories, below the template's fixed beginning.

    Raises:
        InvalidSettings: as `Template` does, or a path that is not absolute.
    """

    def __init__(self, text: str) -> None:
        self._template = Template(os.path.expanduser(text), "LOCAL_PATH_TEMPLATE")
        fixed = self._template.fixed
        if not os.path.isabs(fixed):
            raise self._template.wrong("a path that is not absolute")
        self._root = fixed[: fixed.rindex("/") + 1]

    def path(self, name: AdapterName, base_model_name: str) -> str:
        """The templated path of an adapter."""
        return self._template.fill(name, base_model_name)

    def point(self, path: str, directory: Path) -> str | None:
        """Make `path` a symlink to `directory`, replacing an earlier one at once.

        Returns why it was left alone, where something that is not ours stands there or on the way.

        Raises:
            OSError: the file system refuses.
        """
        os.makedirs(self._root, exist_ok=True)
        *folders, last = [part for part in path[len(self._root) :].split("/") if part]
        if not path.startswith(self._root) or ".." in (*folders, last):
            return "it leaves the template's fixed beginning"
        with contextlib.ExitStack() as stack:
            at = _open_directory(self._root, None)
            stack.callback(os.close, at)
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=at)
                try:
                    at = _open_directory(folder, at)
                except (NotADirectoryError, OSError) as error:
                    if isinstance(error, PermissionError):
                        raise
                    return f"'{folder}' on its way is a link or a file"
                stack.callback(os.close, at)
            return _point(last, directory, at)


def _point(name: str, directory: Path, at: int) -> str | None:
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
