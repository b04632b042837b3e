"""Adapters of embeddings that the head shares are served with PEFT's answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.architectures import TIED_LLAMA
from testbed.forked_engines import ForkedEngines
from testbed.matrix import examine


@pytest.mark.nightly
def test_tied_embeddings_are_served_as_in_peft(engines: ForkedEngines, tmp_path: Path) -> None:
    """As of peft#2879."""
    rows = examine(engines, TIED_LLAMA, tmp_path)
    assert [row.kind for row in rows] == ["", "embeddings", "embeddings-head", "tied"]
    for row in rows[1:]:
        assert (row.not_made, row.differs_from_base) == ("", True), row
        assert (row.refused, row.is_right) == ("", True), rows
