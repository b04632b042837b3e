"""Each kind of adapter on each architecture is served with the reference's answer, or refused as the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.architectures import ARCHITECTURES, Architecture
from testbed.forked_engines import ForkedEngines
from testbed.matrix import examine

ROWS = [pytest.param(one, id=one.label, marks=[] if one.is_quick else [pytest.mark.nightly]) for one in ARCHITECTURES]


@pytest.mark.parametrize("architecture", ROWS)
def test_answers_are_those_of_the_reference(engines: ForkedEngines, architecture: Architecture, tmp_path: Path) -> None:
    rows = {row.kind: row for row in examine(engines, architecture, tmp_path)}
    for kind, row in rows.items():
        if row.not_made:
            continue
        if kind in architecture.refused:
            assert row.refused, row
            assert row.vllm or "that this engine turns or scales" in row.refused, row
            continue
        assert (row.refused, row.stored) == ("", ""), row
        assert row.is_right is (True if architecture.computes(kind) else None), row
    assert rows["attention"].differs_from_base
    assert sum(row.differs_from_base for row in rows.values()) > 1
