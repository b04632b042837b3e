"""A fetch that failed is gone on with by the next one: no range twice, and never bytes of two versions."""

from __future__ import annotations

import os
from dataclasses import replace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lora_plugins.adapter.verify import WEIGHTS_FILE
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.object_store import ObjectSource
from lora_plugins.store import store as store_module
from lora_plugins.store.kept_parts import KEPT_S, all_parts, discard
from lora_plugins.store.store import Store
from testbed import faults
from tests.resolvers.sources.object_bed import (
    FILES,
    LIMITS,
    RANGE,
    WEIGHTS,
    Bed,
    bed,
    locate,
    read,
    s3,
    shared_proxy,
)

_ = (bed, s3, shared_proxy)
WEIGHTS_PATH = r"\.safetensors"
ONE_BY_ONE = replace(LIMITS, parallel=1, timeout_s=2.0)


def break_off(bed: Bed, source: ObjectSource, *, after: int = 2) -> None:
    """Let a fetch end after so many ranges of the weights."""
    bed.proxy.plan(faults.server_error(), path=WEIGHTS_PATH, times=None, skip=after)
    with pytest.raises(SourceUnavailable, match="HTTP 500"):
        bed.serve(source)
    bed.proxy.clear()
    bed.proxy.forget()


def first_bytes(bed: Bed) -> list[int]:
    """Where the ranges of the weights began that were asked for."""
    asked = [request.range or "" for request in bed.proxy.requests("GET", WEIGHTS_PATH)]
    return [int(text.removeprefix("bytes=").split("-")[0]) for text in asked]


def test_the_next_fetch_goes_on_where_one_ended(bed: Bed) -> None:
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    bed.proxy.plan(faults.stall(3.0, after=100_000), path=WEIGHTS_PATH, times=None, skip=2)
    with pytest.raises(SourceUnavailable, match=r"within 2\.1 s"):
        bed.serve(source)
    bed.proxy.clear()
    bed.proxy.forget()
    assert len(all_parts(bed.store.layout)) == 1
    assert read(bed.serve(source)) == FILES
    assert min(first_bytes(bed)) > 2 * RANGE
    assert bed.proxy.bytes_sent(WEIGHTS_PATH) < len(WEIGHTS) - 2 * RANGE
    assert not all_parts(bed.store.layout)
    bed.assert_clean()


def test_several_failures_add_up(bed: Bed) -> None:
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    for _attempt in range(3):
        break_off(bed, source, after=1)
    assert read(bed.serve(source)) == FILES
    assert min(first_bytes(bed)) == 3 * RANGE
    bed.assert_clean()


def test_another_process_goes_on_after_a_restart(bed: Bed) -> None:
    bed.put()
    break_off(bed, bed.source(limits=ONE_BY_ONE, locate_timeout_s=60))
    bed.store = Store(bed.store.layout.root)
    assert read(bed.serve(bed.source())) == FILES
    assert min(first_bytes(bed)) == 2 * RANGE


def test_a_new_version_begins_from_the_start(bed: Bed) -> None:
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    break_off(bed, source)
    new = os.urandom(len(WEIGHTS))
    bed.put(files={**FILES, WEIGHTS_FILE: new})
    assert read(bed.serve(source))[WEIGHTS_FILE] == new
    assert min(first_bytes(bed)) == 0
    assert not all_parts(bed.store.layout), "of the version before"
    bed.assert_clean()


def test_the_same_version_again_is_not_mixed_with_another(bed: Bed) -> None:
    # Between the two fetches of one version, another one was there: every range still is of the located ETag.
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    located = locate(source)
    break_off(bed, source)
    bed.put(files={**FILES, WEIGHTS_FILE: WEIGHTS[::-1]})
    bed.put()
    assert locate(source) == located
    assert read(bed.serve(source)) == FILES


def test_damaged_bytes_are_not_gone_on_with(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.flip(500_000, in_object=True), path=WEIGHTS_PATH, times=None)
    with pytest.raises(SourceUnavailable, match="MD5"):
        bed.serve(bed.source())
    assert not all_parts(bed.store.layout)


def test_kept_bytes_that_spoilt_on_disk_are_fetched_again(bed: Bed) -> None:
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    break_off(bed, source)
    (parts,) = all_parts(bed.store.layout)
    with (parts.path / WEIGHTS_FILE).open("r+b") as file:
        file.write(b"\0" * 1000)
    assert read(bed.serve(source)) == FILES
    assert min(first_bytes(bed)) == 0
    bed.assert_clean()


@pytest.mark.parametrize("spoil", ["cut", "no ranges", "nonsense"])
def test_parts_that_cannot_be_right_are_fetched_again(bed: Bed, spoil: str) -> None:
    bed.put()
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    break_off(bed, source)
    (parts,) = all_parts(bed.store.layout)
    if spoil == "cut":
        os.truncate(parts.path / WEIGHTS_FILE, 1000)
    elif spoil == "no ranges":
        (parts.path / "parts.json").unlink()
    else:
        (parts.path / "parts.json").write_text('{"adapter_model.safetensors": [[-5, 3], [900, 100], [0, 99999999]]}')
    assert read(bed.serve(source)) == FILES
    bed.assert_clean()


def test_the_store_needs_the_room_of_parts(bed: Bed) -> None:
    bed.store.max_bytes = 2 * len(WEIGHTS)
    bed.put()
    bed.put("other")
    source = bed.source(limits=ONE_BY_ONE, locate_timeout_s=60)
    break_off(bed, source)
    assert bed.serve(bed.source(), "other")
    assert len(all_parts(bed.store.layout)) == 1, "both fit"
    bed.bucket.put_many("loras/third", {**FILES, WEIGHTS_FILE: os.urandom(len(WEIGHTS) // 2)})
    assert bed.serve(bed.source(), "third")
    assert not all_parts(bed.store.layout)
    assert len(bed.store.layout.digests()) == 2, "parts go before adapters"


def test_parts_of_a_day_ago_are_swept(bed: Bed) -> None:
    bed.put()
    break_off(bed, bed.source(limits=ONE_BY_ONE, locate_timeout_s=60))
    (parts,) = all_parts(bed.store.layout)
    Store(bed.store.layout.root)
    assert parts.path.is_dir()
    os.utime(parts.path, (parts.kept_at - KEPT_S - 1,) * 2)
    Store(bed.store.layout.root)
    assert not parts.path.exists()


def test_a_place_without_conditions_keeps_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe(f"/resume/sql/{name}", data)
    source = ObjectSource("memory://resume/{lora_name}", limits=LIMITS)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", _breaks_off)
    with pytest.raises(SourceUnavailable):
        bed.serve(source)
    assert not all_parts(bed.store.layout)


def _breaks_off(_: object, path: str, start: int, end: int) -> bytes:
    if start >= RANGE:
        raise ConnectionResetError
    return FILES[path.rsplit("/", 1)[-1]][start:end]


def test_the_deadline_grows_with_the_size(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.put()
    bed.proxy.plan(faults.throttle(len(WEIGHTS) / 4), path=WEIGHTS_PATH, times=None)  # four seconds for all
    with pytest.raises(SourceUnavailable, match=r"within 2\.1 s"):
        bed.serve(bed.source(limits=ONE_BY_ONE, locate_timeout_s=60))
    for parts in all_parts(bed.store.layout):
        discard(parts.path)
    monkeypatch.setattr(store_module, "_BYTES_PER_S", len(WEIGHTS) / 20)
    assert read(bed.serve(bed.source(limits=ONE_BY_ONE, locate_timeout_s=60))) == FILES
