"""`LLM` and `AsyncLLM`: more adapters in one batch than the host budget has room for, and one larger than all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.bed import Bed
from testbed.models import DEMO_ADAPTERS
from tests.e2e.test_offline import said_by

NAMES = [spec.name for spec in DEMO_ADAPTERS]
OVER = "wide"  # 2.1 MB
HOST_MAX_BYTES = "600000"  # of those that fit, the largest has 0.53 MB, all together 1.05

pytestmark = pytest.mark.nightly


def asked_of(bed: Bed) -> list[tuple[str, str | None]]:
    return [*((name, str(bed.adapters / name)) for name in NAMES), ("", None)]


@pytest.mark.deployment(
    "offline LLM", "tested", "more adapters than fit; one larger than the budget is an error of its own"
)
@pytest.mark.parametrize("processes", [1, 0], ids=["engine in a process", "engine in this process"])
def test_llm_answers_all_that_fit_the_budget(bed: Bed, tmp_path: Path, processes: int) -> None:
    said = said_by("offline", bed, tmp_path, processes, asked_of(bed), LORA_PLUGINS_HOST_MAX_BYTES=HOST_MAX_BYTES)
    answers = dict(zip([*NAMES, None], said["outputs"], strict=True))
    reason, text, ids = answers.pop(OVER)
    assert (reason, ids) == ("error", [])
    assert text.startswith("[L004]")
    assert HOST_MAX_BYTES in text or "0.6 MB" in text
    assert {name: ids for name, (_, _, ids) in answers.items()} == {name: bed.answers[name] for name in answers}
    assert (said["loaded"], said["listed"]) == (True, True), "the engine lives"


@pytest.mark.deployment(
    "AsyncLLM", "tested", "more adapters than fit; one larger than the budget is an error of its own"
)
def test_async_llm_answers_all_that_fit_the_budget(bed: Bed, tmp_path: Path) -> None:
    said = said_by("offline_async", bed, tmp_path, 1, asked_of(bed), LORA_PLUGINS_HOST_MAX_BYTES=HOST_MAX_BYTES)
    for part in ("outputs", "again"):
        answers = dict(zip([*NAMES, None], said[part], strict=True))
        status, text = answers.pop(OVER)
        assert status == 507
        assert "[L004]" in text
        assert answers == {name: bed.answers[name] for name in answers}, part
