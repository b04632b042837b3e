"""The source of pushed adapters: their files lie in a directory of the store until the store takes the files over.

Runs on the event loop of an API server: `lifecycle/pushing.py` receives the body and makes a `PushedAdapter`, which
`resolver.py` brings into the store by the same way as any located adapter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, choose_files
from lora_plugins.store.partial_download import PartialDownload

LABEL = "push"


@dataclass(frozen=True, slots=True)
class PushedAdapter(RemoteAdapter):
    """The adapter of one push; `directory` is on the store's file system."""

    directory: Path = Path()

    @classmethod
    def of(cls, name: str, directory: Path, body_sha256: str) -> PushedAdapter:
        """The adapter in a directory; its version is the SHA-256 of the pushed body.

        Raises:
            AdapterNotFound: the directory has no configuration.
        """
        names = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
        files = tuple(SourceFile(file, (directory / file).stat().st_size) for file in choose_files(names))
        return cls(AdapterName(name), LABEL, f"{LABEL}://{name}", body_sha256, files, directory=directory)


class PushSource:
    """Brings pushed files into the store; answers no look-ups."""

    label = LABEL
    remote = False

    async def locate(self, name: AdapterName, base_model_name: str) -> Absence:  # noqa: ARG002
        """Always absent: a push is served when its body arrives."""
        return Absence(LABEL, "", f"'{name}' can only be pushed", was_asked=False)

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Link or copy the files of a `PushedAdapter` into the directory of the download."""
        if not isinstance(adapter, PushedAdapter):
            raise TypeError(type(adapter))
        for file in adapter.files:
            await asyncio.to_thread(_link, adapter.directory / file.name, download.directory / file.name)
            download.landed(file.name, file.size_bytes)


def _link(source: Path, target: Path) -> None:
    # A link copies no bytes, and outlives the push's own directory, which may go at any time.
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
