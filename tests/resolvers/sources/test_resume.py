"""A fetch resumes within itself only: a fetch that failed leaves nothing, and the next fetch begins from the start."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.object_store import ObjectSource
from testbed import faults
from tests.resolvers.sources.object_bed import FILES, LIMITS, RANGE, WEIGHTS, Bed, read

WEIGHTS_PATH = r"\.safetensors"
ONE_BY_ONE = replace(LIMITS, parallel=1, timeout_s=2.0)


def break_off(bed: Bed, source: ObjectSource) -> None:
    """Let a fetch fail after two ranges of the weights."""
    bed.proxy.plan(faults.server_error(), path=WEIGHTS_PATH, times=None, skip=2)
    with pytest.raises(SourceUnavailable, match="HTTP 500"):
        bed.serve(source)
    bed.proxy.clear()
    bed.proxy.forget()


def first_bytes(bed: Bed) -> list[int]:
    """Return the first byte of each range of the weights that was asked for."""
    asked = [request.range or "" for request in bed.proxy.requests("GET", WEIGHTS_PATH)]
    return [int(text.removeprefix("bytes=").split("-")[0]) for text in asked]


def files_of(bed: Bed) -> list[str]:
    """Return every file in the store but locks and the heartbeat."""
    known = (".locks", ".processes", ".index")
    root = bed.store.layout.root
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] not in known)


def test_an_interrupted_range_is_asked_again_within_the_fetch(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.reset(100_000), path=WEIGHTS_PATH, times=1, skip=1)
    assert read(bed.serve(bed.source(limits=replace(ONE_BY_ONE, timeout_s=60.0)))) == FILES
    assert first_bytes(bed) == [0, RANGE, RANGE + 100_000, 2 * RANGE, 3 * RANGE, 4 * RANGE]
    assert bed.proxy.bytes_sent(WEIGHTS_PATH) == len(WEIGHTS)
    bed.assert_clean()


@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS[::-1]], ids=["same version", "new version"])
def test_the_fetch_after_a_failed_one_begins_from_the_start(bed: Bed, weights: bytes) -> None:
    bed.put()
    before, source = files_of(bed), bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    break_off(bed, source)
    assert files_of(bed) == before, "a failed fetch leaves nothing"
    bed.put(files={**FILES, WEIGHTS_FILE: weights})
    assert read(bed.serve(source))[WEIGHTS_FILE] == weights
    assert first_bytes(bed) == [0, RANGE, 2 * RANGE, 3 * RANGE, 4 * RANGE]
    bed.assert_clean()


def test_a_slow_fetch_that_goes_on_outlasts_the_deadline(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.throttle(len(WEIGHTS) / 4), path=WEIGHTS_PATH, times=None)  # four seconds for all
    began = time.monotonic()
    assert read(bed.serve(bed.source(limits=replace(ONE_BY_ONE, timeout_s=1.5), locate_timeout_s=60))) == FILES
    assert time.monotonic() - began > 2 * 1.5
