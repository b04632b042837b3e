"""Digests and their beginnings: found at once, and without a look at the whole store for each request."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from lora_plugins.store.layout import Layout, is_prefix
from lora_plugins.store.published import Published

DIGEST = "0123456789abcdef" * 4
OTHERS = ["0" * 64, f"01234567{'f' * 56}", "f" * 64]
LONG_AGO_S = 1_000_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Layout(tmp_path).create()
    for digest in (DIGEST, *OTHERS):
        (tmp_path / digest).mkdir()
    return tmp_path


def settle(root: Path, at_s: float = LONG_AGO_S) -> None:
    os.utime(root, (at_s, at_s))


@pytest.mark.parametrize("text", ["", DIGEST[:7], DIGEST + "0", "ABCDEF01", "0123456g", "../../etc"])
def test_what_cannot_begin_a_digest_matches_none(root: Path, text: str) -> None:
    assert Published(Layout(root)).matching(text) == []
    assert not is_prefix(text)


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_beginning_matches_all_digests_that_have_it(root: Path, is_settled: bool) -> None:
    published = Published(Layout(root))
    if is_settled:
        settle(root)
    for _ in range(2):
        assert published.matching(DIGEST[:8]) == [DIGEST, OTHERS[1]]
        assert published.matching(DIGEST[:9]) == published.matching(DIGEST) == [DIGEST]
        assert published.matching("f" * 8) == ["f" * 64]
        assert published.matching("0" * 63) == ["0" * 64]
        assert published.matching("deadbeef") == published.matching("d" * 64) == []


@pytest.mark.parametrize("looked_at", ["long after", "at the moment of"])
def test_what_comes_and_goes_is_seen_at_once(root: Path, looked_at: str) -> None:
    """A change at the moment of a look may leave the time of change as it was."""
    published, now_s = Published(Layout(root)), time.time()
    settle(root, LONG_AGO_S if looked_at == "long after" else now_s)
    new = f"01234567{'0' * 56}"
    assert published.matching(new[:12]) == []
    (root / new).mkdir()
    if looked_at == "at the moment of":
        settle(root, now_s)
    assert published.matching(new[:12]) == published.matching(new) == [new]
    shutil.rmtree(root / new)
    assert published.matching(new[:12]) == published.matching(new) == []


def test_a_store_that_has_not_changed_is_listed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[object] = []
    monkeypatch.setattr(os, "listdir", lambda path, real=os.listdir: listed.append(path) or real(path))
    published = Published(Layout(root))
    settle(root)
    for number in range(20):
        assert published.matching(f"deadbee{number % 10}") == []
    assert len(listed) == 1
