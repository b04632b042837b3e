"""A version in the engine's form, which the store obtains from the same version in its source's form.

Runs on the event loop of an API server: `versions.py` describes the conversion of a version that lies in the store, and
the store calls `write` with an empty directory. Reading processes write the weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.layouts.conversion_plan import Conversion
from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.adapter.layouts.writing import tensors_of, weights_bytes
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.store.manifest import Converted, Manifest
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import StoredAdapter
from lora_plugins.verification.children import children


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """A conversion to write; the store takes it like an adapter that a source has.

    Attributes:
        uri: of the original at its source.
        version: of the original at its source.
        converted: the form, the original's digest and the changes, for the manifest.
        original: the directory of the original in the store.
        conversion: how each tensor is made of the original's tensors.
        config: the configuration of the conversion.
        promised: name, size in bytes and SHA-256 of the files; the converted files' SHA-256 are unknown.
    """

    uri: str
    version: str
    converted: Converted
    original: Path
    conversion: Conversion = field(repr=False)
    config: bytes = field(repr=False)
    promised: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, stored: StoredAdapter[Any], uri: str, version: str, conversion: Conversion, form: str) -> Self:
        """Describe the conversion of a leased version of the store, whose files for chats stay as they are."""
        config = canonical_bytes(conversion.config)
        converted = Converted(form, stored.digest, conversion.changes)
        # No SHA-256 in advance: the bytes are written during the download.
        made = (CONFIG_FILE, len(config), ""), (WEIGHTS_FILE, weights_bytes(tensors_of(conversion)), "")
        files = Manifest.read(stored.directory).files
        promised = (*made, *((file.name, file.size_bytes, file.sha256) for file in files if file.name in CHAT_FILES))
        return cls(uri, version, converted, stored.directory, conversion, config, promised)

    async def write(self, download: PartialDownload) -> None:
        """Write the files into the directory of the download; raises what `write_made` raises."""
        names = [name for name, _, _ in self.promised]
        await write_made(download, names, self.config, tensors_of(self.conversion), self.original)


async def write_made(
    download: PartialDownload, names: Iterable[str], config: bytes, tensors: Sequence[NewTensor], original: Path
) -> None:
    """Write the files `names` of an adapter that no source has, a conversion or a mixture.

    The tensors' own paths to files begin at the directory `original`, from which files for chats are copied.

    Raises:
        OSError: an original cannot be read, or a file cannot be written.
    """
    for name in names:
        target = download.directory / name
        if name == WEIGHTS_FILE:
            # Written straight into the store's directory, and hashed as it grows, as every fetch.
            await asyncio.wrap_future(children().write(tensors, original, target, partial(download.landed, name)))
        elif name == CONFIG_FILE:
            await asyncio.to_thread(target.write_bytes, config)
        else:
            await asyncio.to_thread(shutil.copyfile, original / name, target)
