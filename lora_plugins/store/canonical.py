"""Put the configuration that an engine reads in the place of the source's, which is kept beside it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.store.manifest import StoredFile


def put_canonical(directory: Path, canonical: bytes) -> StoredFile:
    """Write it into a directory that nobody reads yet; it is not durable then.

    Raises:
        OSError: it cannot be written.
    """
    os.rename(directory / CONFIG_FILE, directory / ORIGINAL_CONFIG_FILE)
    (directory / CONFIG_FILE).write_bytes(canonical)
    return StoredFile(CONFIG_FILE, len(canonical), hashlib.sha256(canonical).hexdigest())
