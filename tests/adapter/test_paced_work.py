"""What a long header costs an event loop beside it: the longest piece of computation between two pauses."""

from __future__ import annotations

import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from lora_plugins.adapter import paced_work
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ModelModules, ModulePlace
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.settings import Settings
from tests.make import config_bytes, put, read_name, with_header

MODULES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}"
    for layer in range(91)
    for expert in range(128)
    for part in ("gate_proj", "up_proj", "down_proj")
]


@pytest.fixture
def pieces_s(monkeypatch):
    """This gets the processor time that a thread has taken from one pause to the next."""
    pieces: list[float] = []
    began: dict[int, float] = {}

    def sleep(duration_s):
        thread = threading.get_ident()
        pieces.append(time.thread_time() - began.get(thread, 0.0))
        time.sleep(duration_s)
        began[thread] = time.thread_time()

    monkeypatch.setattr(paced_work, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep))
    return pieces


def test_a_header_of_70_000_tensors_leaves_the_loop_running(tmp_path, pieces_s):
    header, at = {}, 0
    for module in MODULES:
        for side, shape in (("A", [1, 2]), ("B", [2, 1])):
            begin, at = at, at + 4
            header[f"base_model.model.{module}.lora_{side}.weight"] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [begin, at],
            }
    files = {CONFIG_FILE: config_bytes(r=1), WEIGHTS_FILE: with_header(json.dumps(header).encode(), bytes(at))}
    put(tmp_path, files)
    modules = ModelModules(
        "Moe", "0.32.0", {module: ModulePlace(module, in_features=2, out_features=2) for module in MODULES}
    )
    base = BaseModel("org/tiny", model=Model(modules, read_name))
    gc.disable()  # its pauses are those of the whole process's objects, of which a server freezes its own
    try:
        with ThreadPoolExecutor(1) as thread:
            verified = thread.submit(verify_adapter, tmp_path, base, Settings()).result()
            took_s = thread.submit(time.thread_time).result()
    finally:
        gc.enable()
    assert len(verified.weights.pairs) == len(MODULES) == 34_944
    assert sum(pieces_s) > 0.7 * took_s, "most of it is done in pieces"
    assert max(pieces_s) < 0.05 * took_s
    assert sorted(pieces_s)[len(pieces_s) // 2] < 0.002 * took_s


def test_the_main_thread_does_not_pause(pieces_s):
    assert list(paced_work.paced(range(100_000))) == list(range(100_000))
    assert pieces_s == []
