"""A request with `prompt_logprobs` beside others, which crashes vLLM's CPU engine (docs/operate/known-limits.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.bed import Bed
from tests.e2e.test_offline import said_by


@pytest.mark.parametrize("first", ["sql", None])
def test_prompt_logprobs_beside_others_are_those_alone(bed: Bed, tmp_path: Path, first: str | None) -> None:
    names = [first, "chat", None, "sql"]
    adapters = [(name or "", None if name is None else str(bed.adapters / name)) for name in names]
    (alone, answer), (beside, answers) = said_by("offline_prompt_logprobs", bed, tmp_path, 0, adapters)["said"]
    assert beside == pytest.approx(alone, abs=1e-4)
    assert len(set(alone)) > 1
    assert answer == [bed.answers[first]]
    assert answers == [bed.answers[name] for name in names]
