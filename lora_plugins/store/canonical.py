"""Put the configuration that an engine reads in the place of the source's, which is kept beside it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.store.layout import MANIFEST_FILE, make_durable, sync_directory
from lora_plugins.store.manifest import Manifest, StoredFile

CANONICAL_FILE = "adapter_config.canonical.json"  # while it is written


def put_canonical(directory: Path, canonical: bytes, temporary: Path) -> StoredFile:
    """Write it, by way of a temporary path on the same file system; whoever reads finds one or the other.

    It is not durable yet.

    Raises:
        OSError: it cannot be written; the source's is in its place then.
    """
    temporary.write_bytes(canonical)
    original = directory / ORIGINAL_CONFIG_FILE
    original.unlink(missing_ok=True)  # of an attempt that ended before the manifest was written
    os.link(directory / CONFIG_FILE, original)
    os.replace(temporary, directory / CONFIG_FILE)
    return StoredFile(CONFIG_FILE, len(canonical), hashlib.sha256(canonical).hexdigest())


def add_canonical(directory: Path, canonical: bytes, temporaries: tuple[Path, Path]) -> None:
    """Bring an entry of an earlier version, which engines may read meanwhile, into this one's form.

    Until its manifest is written, which is the last, it is not whole: then it is fetched again.

    Raises:
        InvalidAdapter: it has no readable manifest. OSError: it cannot be written.
    """
    manifest = Manifest.read(directory)
    if manifest.canonical is not None:
        return
    described = replace(manifest, canonical=put_canonical(directory, canonical, temporaries[0]))
    temporaries[1].write_text(described.to_json())
    make_durable([directory / CONFIG_FILE, temporaries[1], directory])
    os.replace(temporaries[1], directory / MANIFEST_FILE)
    sync_directory(directory)
