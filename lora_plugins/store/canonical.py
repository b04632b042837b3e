"""Put the canonical configuration in the place of the source's file, which stays beside the new file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.store.manifest import StoredFile


def put_canonical(directory: Path, canonical: bytes) -> StoredFile:
    """Write the configuration into a directory that no other process reads yet; the caller makes the file durable.

    Raises:
        OSError: the file cannot be written.
    """
    os.rename(directory / CONFIG_FILE, directory / ORIGINAL_CONFIG_FILE)
    (directory / CONFIG_FILE).write_bytes(canonical)
    return StoredFile(CONFIG_FILE, len(canonical), hashlib.sha256(canonical).hexdigest())
