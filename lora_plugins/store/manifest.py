"""The manifest of a published adapter: its source, its files, their sizes and SHA-256.

A file, written once by the process that publishes, in the adapter's directory; every process that uses the adapter
reads it. The manifest's own digest of all files is the directory's name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import MsgspecError, Struct, json

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.adapter.files import map_os_error
from lora_plugins.errors import InvalidAdapter, describing
from lora_plugins.store.disk_errors import is_damage
from lora_plugins.store.layout import MANIFEST_FILE


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an adapter."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Converted:
    """How an adapter was brought into an engine's form.

    Attributes:
        form: a key of the engine's modules.
        original_digest: digest of the adapter as its source has the files.
        changes: the changes made, in words.
    """

    form: str
    original_digest: str
    changes: tuple[str, ...]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest beside the files; `digest` names the directory.

    `uri` and `version` are of the fetch that brought the files; another source may have the same bytes.

    Attributes:
        files: the source's files under the source's names; the digest covers them.
        canonical: the configuration in the place of the source's, which lies beside the new file
            (`adapter/canonical.py`).
    """

    digest: str
    uri: str
    version: str
    files: tuple[StoredFile, ...]
    fetched_at: str
    canonical: StoredFile
    converted: Converted | None = None

    @property
    def on_disk(self) -> tuple[StoredFile, ...]:
        """The files of the directory by their names there, without the manifest."""
        kept = (replace(file, name=ORIGINAL_CONFIG_FILE) if file.name == CONFIG_FILE else file for file in self.files)
        return (self.canonical, *kept)

    @property
    def size_bytes(self) -> int:
        """Bytes of the source's files together."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        return json.format(json.encode(self), indent=1) + b"\n"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a published adapter.

        Raises:
            InvalidAdapter: the manifest is missing or damaged.
            SourceUnavailable: the manifest cannot be read at the moment.
        """
        try:
            return json.decode((directory / MANIFEST_FILE).read_bytes(), type=cls)
        except (OSError, ValueError, MsgspecError) as error:
            if isinstance(error, OSError) and not is_damage(error):
                with describing(file=MANIFEST_FILE):
                    raise map_os_error(error) from error
            raise InvalidAdapter(
                f"a store entry without a readable manifest ({type(error).__name__})",
                expected="manifest.json as it was written",
                remedy="remove the entry; it is fetched again",
                file=MANIFEST_FILE,
            ) from None


def put_canonical(directory: Path, canonical: bytes) -> StoredFile:
    """Put the configuration that engines read in the place of the source's file, which stays beside the new file.

    No other process reads the directory yet; the caller makes the file durable.

    Raises:
        OSError: the file cannot be written.
    """
    os.rename(directory / CONFIG_FILE, directory / ORIGINAL_CONFIG_FILE)
    (directory / CONFIG_FILE).write_bytes(canonical)
    return StoredFile(CONFIG_FILE, len(canonical), hashlib.sha256(canonical).hexdigest())


def digest_of(files: Iterable[StoredFile]) -> str:
    """The name of a set of files: SHA-256 over their names, sizes and SHA-256."""
    lines = sorted(f"{file.name}\0{file.size_bytes}\0{file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
