"""Adapters are read by other processes: nothing in them stops, fills or ends this one."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from tests.make import adapter_files, config_bytes, put
from tests.verification.conftest import HOLD, HOLD_WHERE_ASKED, program, read, reading_is


def test_one_process_answers_one_after_the_other(children: Children, adapter: Path) -> None:
    children.warm()
    for _ in range(5):
        assert read(children, adapter)
    (pid,) = children.pids()
    assert psutil.Process(pid).ppid() == os.getpid()
    assert psutil.Process(pid).nice() > os.getpriority(os.PRIO_PROCESS, 0)


def test_the_memory_of_the_server_does_not_end_it(children: Children, adapter: Path) -> None:
    assert len(np.ones(64 << 20)) == 64 << 20  # half a GiB, which a process that it starts has for a moment
    assert read(children, adapter)
    pids = children.pids()
    assert read(children, adapter)
    assert children.pids() == pids != []


def test_a_slow_adapter_does_not_hold_another(
    children: Children, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(children, adapter)
    slow = put(tmp_path / "slow", adapter_files())
    (slow / CONFIG_FILE).unlink()
    reading_is(monkeypatch, HOLD)
    (warm,) = children.pids()
    busy = children._idle.pop()
    before = set(psutil.Process().children())
    waiting = children.read(slow, Settings())
    while not (started := set(psutil.Process().children()) - before):
        time.sleep(0.01)
    children._idle.append(busy)
    assert read(children, adapter)
    assert children.pids() == [warm]
    assert not waiting.done()
    for child in started:
        child.terminate()


def test_large_adapters_keep_no_small_one_waiting(
    children: Children, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(children, adapter)
    program(monkeypatch, HOLD_WHERE_ASKED)
    children._idle.pop().end()
    header = json.dumps({"__metadata__": {"x": "x" * (1 << 20)}}).encode()
    weights = len(header).to_bytes(8, "little") + header
    files = {CONFIG_FILE: config_bytes(), WEIGHTS_FILE: weights, "hold": b""}
    large = [put(tmp_path / f"large-{number}", files) for number in range(3)]
    reading = [children.read(one, Settings()) for one in large]
    for _ in range(3):
        assert read(children, adapter)
    assert not any(one.done() for one in reading)
    for one in large:
        (one / "hold").unlink()
    for one in reading:
        with pytest.raises(InvalidAdapter):
            one.result()


def test_no_more_than_two_are_read_at_once(
    children: Children, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, HOLD_WHERE_ASKED)
    before = set(psutil.Process().children())
    held = [put(tmp_path / f"held-{number}", {**adapter_files(), "hold": b""}) for number in range(5)]
    reading = [children.read(one, Settings()) for one in held]
    while len(started := set(psutil.Process().children()) - before) < 2:
        time.sleep(0.01)
    time.sleep(1)  # a third process would be seen by now
    assert set(psutil.Process().children()) - before == started
    reading.pop().cancel()  # it waits, and nobody does its work
    for one in held:
        (one / "hold").unlink()
    assert [one.result(60).adapter.config.max_rank for one in reading] == [4] * 4
    assert len(children.pids()) == 2


def test_this_process_goes_on_while_much_is_read(children: Children, tmp_path: Path) -> None:
    """An adapter of 20,000 tensors, as of a mixture of experts, holds up no other thread."""
    assert read(children, put(tmp_path / "sql", adapter_files()))
    header, at = {}, 0
    for number in range(10_000):
        for side, shape in (("A", [1, 2]), ("B", [2, 1])):
            name = f"base_model.model.layers.{number}.mlp.experts.up_proj.lora_{side}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + 8]}
    text = json.dumps(header).encode()
    files = {CONFIG_FILE: config_bytes(r=1), WEIGHTS_FILE: len(text).to_bytes(8, "little") + text + bytes(at)}
    reading = children.read(put(tmp_path / "many", files), Settings())
    gaps = []
    while not reading.done():
        began = time.perf_counter()
        threading.Event().wait(0.001)
        gaps.append(time.perf_counter() - began)
    assert len(reading.result().adapter.weights.pairs) == 10_000
    assert sorted(gaps)[len(gaps) * 99 // 100] < 0.05
