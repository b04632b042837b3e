"""The manifest: written and read back, and anything else refused."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from lora_plugins.adapter.config import CONFIG_FILE, ORIGINAL_CONFIG_FILE
from lora_plugins.errors import InvalidAdapter
from lora_plugins.store.layout import MANIFEST_FILE
from lora_plugins.store.manifest import Converted, Manifest, StoredFile, digest_of, put_canonical

FILES = (StoredFile("adapter_config.json", 10, "a" * 64), StoredFile("adapter_model.safetensors", 20, "b" * 64))
CANONICAL = StoredFile("adapter_config.json", 5, "c" * 64)
MANIFEST = Manifest(digest_of(FILES), "s3://bucket/größe", "v1", FILES, "2026-01-01T00:00:00Z", CANONICAL)


def written(directory: Path, text: str | bytes) -> Path:
    (directory / MANIFEST_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


@pytest.mark.parametrize("converted", [None, Converted("form", "b" * 64, ("keys renamed (4 modules)",))])
def test_it_is_read_back_as_it_was_written(tmp_path: Path, converted: Converted | None) -> None:
    manifest = replace(MANIFEST, converted=converted)
    assert Manifest.read(written(tmp_path, manifest.to_json())) == manifest
    assert manifest.size_bytes == 30


def test_the_canonical_configuration_lies_beside_the_sources() -> None:
    assert MANIFEST.on_disk == (CANONICAL, StoredFile("adapter_config.original.json", 10, "a" * 64), FILES[1])


RAW = json.loads(MANIFEST.to_json())


@pytest.mark.parametrize(
    "text",
    [
        *["", "{", "null", "[]", '"text"', b"\xff\xfe", b"\0" * 100],
        *[json.dumps({key: value for key, value in RAW.items() if key != lost}) for lost in ("files", "digest")],
        json.dumps({**RAW, "more": 1}),
        json.dumps({**RAW, "files": 5}),
        json.dumps({**RAW, "files": ["name"]}),
        json.dumps({**RAW, "files": [{"name": "x"}]}),
        json.dumps({**RAW, "files": [{"name": 5, "size_bytes": 1, "sha256": ""}]}),
        json.dumps({**RAW, "files": [{"name": "x", "size_bytes": "1", "sha256": ""}]}),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_anything_else_is_refused(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Manifest.read(written(tmp_path, text))
    assert caught.value.file == MANIFEST_FILE


def test_a_missing_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="FileNotFoundError"):
        Manifest.read(tmp_path)


def test_the_digest_depends_on_names_sizes_and_bytes() -> None:
    assert digest_of(FILES) == digest_of(FILES[::-1]) == digest_of(iter(FILES))
    changed = [
        (FILES[0],),
        (),
        (FILES[0], StoredFile("adapter_model.bin", 20, "b" * 64)),
        (FILES[0], StoredFile("adapter_model.safetensors", 21, "b" * 64)),
        (FILES[0], StoredFile("adapter_model.safetensors", 20, "c" * 64)),
    ]
    digests = {digest_of(files) for files in (FILES, *changed)}
    assert len(digests) == 1 + len(changed)


def test_the_sources_configuration_is_kept_beside_ours(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"theirs")
    stored = put_canonical(tmp_path, b"ours")
    assert (tmp_path / ORIGINAL_CONFIG_FILE).read_bytes() == b"theirs"
    assert (tmp_path / stored.name).read_bytes() == b"ours"
    assert (stored.name, stored.size_bytes, stored.sha256) == (CONFIG_FILE, 4, sha256(b"ours").hexdigest())
