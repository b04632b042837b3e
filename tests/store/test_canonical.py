"""The configuration that an engine reads, in the place of the source's."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.store.canonical import put_canonical


def test_the_sources_configuration_is_kept_beside_ours(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"theirs")
    stored = put_canonical(tmp_path, b"ours")
    assert (tmp_path / ORIGINAL_CONFIG_FILE).read_bytes() == b"theirs"
    assert (tmp_path / stored.name).read_bytes() == b"ours"
    assert (stored.name, stored.size_bytes, stored.sha256) == (CONFIG_FILE, 4, sha256(b"ours").hexdigest())
