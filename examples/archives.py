"""Adapters in zip files."""

import asyncio
import zipfile
from pathlib import Path

from lora_plugins.absence import Absence
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, VersionChanged, choose_files, version_of


class ZipSource:
    label = "archives"  # in logs and metrics
    remote = False  # asking costs no round trip

    def __init__(self, root):
        self.root = Path(root)

    def __str__(self):
        return f"{self.label} ({self.root})"

    async def locate(self, name, base_model_name):
        return await asyncio.to_thread(self._locate, name)

    async def fetch(self, adapter, download):
        await asyncio.to_thread(self._fetch, adapter, download.directory)

    def _locate(self, name):
        if not self.root.is_dir():  # an outage, which is no absence
            raise SourceUnavailable(f"no directory {self.root}", remedy="mount it")
        path = self.root / f"{name}.zip"
        if not path.is_file():
            return Absence(self.label, str(path), "no such file")
        with zipfile.ZipFile(path) as archive:
            there = {info.filename: info for info in archive.infolist()}
        chosen = [there[file] for file in choose_files(there)]  # the configuration and the weights
        files = tuple(SourceFile(info.filename, info.file_size, f"{info.CRC:08x}") for info in chosen)
        return RemoteAdapter(name, self.label, f"zip://{path}", version_of(files), files)

    def _fetch(self, adapter, directory):
        found = self._locate(adapter.name)
        if not isinstance(found, RemoteAdapter) or found.version != adapter.version:
            raise VersionChanged("another archive than before", remedy="ask again")
        with zipfile.ZipFile(self.root / f"{adapter.name}.zip") as archive:
            for file in adapter.files:
                (directory / file.name).write_bytes(archive.read(file.name))


def source(env):
    return ZipSource(env["LORA_ARCHIVES"]) if "LORA_ARCHIVES" in env else None
