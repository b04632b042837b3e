"""What digest an adapter must have."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lora_plugins.store.manifest import StoredFile, digest_of


def of_files(directory: Path) -> str:
    """Of an adapter as its source has it."""
    files = [file for file in directory.iterdir() if file.name.startswith("adapter_")]
    sums = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return digest_of(StoredFile(file.name, file.stat().st_size, sums[file]) for file in files)
