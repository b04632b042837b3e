"""The templates `S3_PATH_TEMPLATE` and `LOCAL_PATH_TEMPLATE`: an adapter's name becomes a URL, or the path of a link.

Used on the event loop of an API server by `object_store.py`; `LocalLink.point_to` runs in a thread, once the adapter is
in the store. A template is text with the placeholders `{base_model_name}`, `{lora_name}` and `{revision}`, and no other
syntax of `str.format`. The values, which requests choose, stand behind a fixed beginning and cannot lead out of the
folder of the beginning.
"""

from __future__ import annotations

import contextlib
import os
import re
import string
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidSettings
from lora_plugins.log import logger
from lora_plugins.store.layout import is_digest

DEFAULT_REVISION = "main"  # the revision of a name without `@revision`, here and on the Hub
_PLACEHOLDERS = ("base_model_name", "lora_name", "revision")
# Characters that stay unquoted in a URL: as in `resolvers.sources.uri.SourceUri`, and `/` and `:`.
_PLAIN = "!$&'()*+,;=:~-._@/"


class Template:
    """A checked template; `variable` is the environment variable with the template, for errors.

    Attributes:
        text: the template as the operator wrote it.
        has_revision: whether the template has the placeholder `{revision}`.
        has_base: whether the template has the placeholder `{base_model_name}`.
        fixed: the text before the first placeholder.

    Raises:
        InvalidSettings: an unknown placeholder, a conversion or format, or no `{lora_name}`.
    """

    def __init__(self, text: str, variable: str) -> None:
        self.text = text
        self._variable = variable
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise self.wrong("unbalanced braces") from error
        for _, field, form, conversion in parsed:
            if field is not None and field not in _PLACEHOLDERS:
                raise self.wrong(f"the placeholder {{{field}}}")
            if form or conversion:
                raise self.wrong(f"a conversion of {{{field}}}")
        self._parts = [part[:2] for part in parsed]  # text, and the placeholder behind the text, if any
        used = {field for _, field in self._parts}
        if "lora_name" not in used:
            raise self.wrong("a template without {lora_name}")
        self.has_revision = "revision" in used
        self.has_base = "base_model_name" in used
        self.fixed = self._parts[0][0]

    @property
    def folder(self) -> str:
        """The folder of the fixed beginning, with a slash at its end."""
        return self.fixed[: self.fixed.rindex("/") + 1]

    def fill(self, name: AdapterName, base_model_name: str, *, quoted: bool = False) -> str:
        """The text for an adapter; `quoted` percent-encodes the values.

        Without `{revision}` in the template, `{lora_name}` stands for the name with its `@revision`, if any. Of the
        base model's name, which may be a path, empty segments, `.` and `..` are left out.
        """
        values = {
            "base_model_name": _path_of(base_model_name),
            "lora_name": name.path if self.has_revision else str(name),
            "revision": name.revision or DEFAULT_REVISION,
        }
        return "".join(
            literal + ("" if field is None else quote(values[field], _PLAIN) if quoted else values[field])
            for literal, field in self._parts
        )

    def read(self, text: str, base_model_name: str) -> AdapterName | None:
        """The adapter for which `fill` makes `text`; None where `fill` makes `text` for no adapter.

        None, too, where the template has `{base_model_name}` and `base_model_name` is empty.
        """
        if self.has_base and not base_model_name:
            return None
        pattern = ""
        for literal, field in self._parts:
            pattern += re.escape(literal)
            if field == "base_model_name":
                pattern += re.escape(_path_of(base_model_name))
            elif field is not None:
                # A placeholder that occurs twice must have the same text twice.
                pattern += f"(?P={field})" if f"(?P<{field}>" in pattern else f"(?P<{field}>.+)"
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is None:
            return None
        revision = match.groupdict().get("revision", DEFAULT_REVISION)
        try:
            return AdapterName.parse(match["lora_name"] + (f"@{revision}" if revision != DEFAULT_REVISION else ""))
        except AdapterNotFound:
            return None

    def wrong(self, found: str) -> InvalidSettings:
        """An error about this template, without the template's text, which may have a password."""
        return InvalidSettings(
            f"{found} in {self._variable}",
            expected="text with {base_model_name}, {lora_name} and {revision} behind a fixed beginning",
            remedy=f"correct {self._variable}",
        )


def parse_local(text: str) -> Template:
    """The template `LOCAL_PATH_TEMPLATE`, for the paths of `LocalLink`.

    Raises:
        InvalidSettings: see `Template`; or a path that is not absolute.
    """
    template = Template(os.path.expanduser(text), "LOCAL_PATH_TEMPLATE")
    if not os.path.isabs(template.fixed):
        raise template.wrong("a path that is not absolute")
    return template


def _path_of(base_model_name: str) -> str:
    """The base model's name as a relative path that stays below the fixed beginning."""
    return "/".join(part for part in base_model_name.split("/") if part not in ("", ".", ".."))


@dataclass(frozen=True, slots=True)
class LocalLink:
    """A path below a fixed root that becomes a symlink to an adapter; files and links of other programs there stay."""

    root: str
    path: str

    def point_to(self, directory: Path, name: str) -> None:
        """Make the path a link to `directory`, atomically; on failure, only log the reason with the adapter's name."""
        try:
            refusal = self._point_to(directory)
        except OSError as error:
            refusal = error.strerror or type(error).__name__
        if refusal is not None:
            logger.warning("Adapter '%s': %s is not made a link to the adapter: %s", name, ascii(self.path), refusal)

    def _point_to(self, directory: Path) -> str | None:
        """Make the link; returns the reason for leaving the path alone, or None where the link now leads there.

        Raises:
            OSError: the link cannot be made.
        """
        os.makedirs(self.root, exist_ok=True)
        *folders, last = [part for part in self.path[len(self.root) :].split("/") if part]
        if not self.path.startswith(self.root) or ".." in (*folders, last):
            return "it leaves the template's fixed beginning"
        with contextlib.ExitStack() as stack:
            at = _open_directory(self.root, at=None)
            stack.callback(os.close, at)
            # Open folder by folder without following links: another user must not lead the link elsewhere.
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=at)
                try:
                    at = _open_directory(folder, at)
                except PermissionError:  # the caller logs the system's reason
                    raise
                except OSError:  # O_NOFOLLOW and O_DIRECTORY refuse links and files
                    return f"'{folder}' on its way is a link or a file"
                stack.callback(os.close, at)
            return _replace_link(last, directory, at)


def _replace_link(name: str, directory: Path, at: int) -> str | None:
    """Make `name` in the folder open as `at` a link to `directory`; returns the reason for not doing so, or None.

    Raises:
        OSError: the link cannot be made.
    """
    try:
        target = os.readlink(name, dir_fd=at)
    except FileNotFoundError:
        target = None
    except OSError:  # `name` exists and is no link
        return "a directory or file that is not ours stands there"
    if target == str(directory):
        return None
    # Links of this package lead to a directory with a digest as name.
    if target is not None and not is_digest(os.path.basename(target)):
        return "a link that is not ours stands there"
    # In the same directory, so that the replacement is one rename. No adapter's name begins with a dot.
    fresh = f".{os.urandom(8).hex()}.link"
    os.symlink(directory, fresh, dir_fd=at)
    try:
        os.replace(fresh, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        os.unlink(fresh, dir_fd=at)
        raise
    return None


def _open_directory(path: str, at: int | None) -> int:
    """Open a folder of the folder open as `at`, or, where None, the root by its absolute path.

    Raises:
        OSError: the folder cannot be opened, or below the root is a link.
    """
    # The operator may have made symlinks on the way to the root; below the root, links are not followed.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if at is None else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=at)
