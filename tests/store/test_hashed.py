"""Which entries were hashed: known by the identity of their files."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from lora_plugins.store import hashed
from lora_plugins.store.hashed import HashedEntries, identity_of


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    made = tmp_path / "entry"
    made.mkdir()
    (made / "b").write_bytes(b"2")
    (made / "a").write_bytes(b"1")
    return made


def test_files_that_were_hashed_need_not_be_again(entry: Path) -> None:
    entries = HashedEntries()
    assert not entries.has("digest", identity_of(entry), math.inf)
    entries.note("digest", identity_of(entry))
    assert entries.has("digest", identity_of(entry), math.inf)
    assert not entries.has("digest", identity_of(entry), -1.0)
    entries.forget("digest")
    assert not entries.has("digest", identity_of(entry), math.inf)


def test_a_changed_file_differs_and_a_linked_one_does_not(entry: Path) -> None:
    entries = HashedEntries()
    entries.note("digest", identity_of(entry))
    os.link(entry / "a", entry.parent / "link")
    assert not entries.has("digest", identity_of(entry), math.inf)
    assert not entries.differs("digest", identity_of(entry))
    (entry / "a").write_bytes(b"other")
    assert entries.differs("digest", identity_of(entry))


def test_a_directory_that_is_gone_has_no_identity(entry: Path) -> None:
    assert identity_of(entry / "nowhere") is None
    entries = HashedEntries()
    entries.note("digest", None)
    assert not entries.has("digest", identity_of(entry), math.inf)


def test_the_entries_remembered_are_bounded(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "_REMEMBERED", 2)
    entries = HashedEntries()
    for digest in ("first", "second", "third"):
        entries.note(digest, identity_of(entry))
    known = [entries.has(digest, identity_of(entry), math.inf) for digest in ("first", "second", "third")]
    assert known == [False, True, True]
