"""Adapters are read by other processes: nothing in them stops, fills or ends this one."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.layouts.moves import (
    ColumnsOfExpert,
    OnDiagonal,
    Rows,
    Same,
    Stacked,
    StackedA,
    StackedB,
    Zeros,
)
from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.adapter.layouts.writing import tensors_of, write_weights
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.verification import limits, process
from lora_plugins.verification.children import Children
from lora_plugins.verification.messages import Found, Tensors, decode_request, encode
from tests.make import BASE, LAYER, adapter_files, config_bytes, pair, put, sharded, weights

NAMED = adapter_files({name.replace(".weight", ".default.weight"): array for name, array in weights().items()})
HOLD = "import time; from lora_plugins.verification import child; child.verify_adapter = lambda *_: time.sleep(600)"


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return put(tmp_path / "sql", adapter_files())


def read(children: Children, directory: Path, **changes: object) -> Found:
    return children.read(directory, replace(Settings(), **changes)).result(120)


def program(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Have every process that is started now do this before it answers."""
    monkeypatch.setattr(process, "_PROGRAM", process._PROGRAM.replace("main()", f"{first}\nmain()"))


def test_it_reads_what_verification_in_this_process_reads(children: Children, adapter: Path) -> None:
    found = read(children, adapter)
    here = verify_adapter(adapter, None, Settings())
    assert found.adapter == replace(here, config=replace(here.config, targets=None))
    assert parse_config(found.canonical) == here.config


def test_weights_of_every_kind_cross(children: Children, tmp_path: Path) -> None:
    tensors = {**weights(), **pair(LAYER.format(1, "q_proj"), 16, 8, 8)}
    changes = {"rank_pattern": {r"layers\.1\..*q_proj": 16}, "alpha_pattern": {"v_proj": 2.5}, "use_rslora": True}
    many = put(tmp_path / "many", adapter_files(tensors, **changes, modules_to_save=["score"]))
    here = verify_adapter(many, None, Settings())
    found = read(children, many).adapter
    assert found.weights == here.weights
    assert found.config == replace(here.config, targets=None)
    assert dict(found.config.rank_pattern) == {r"model\.layers\.1\.self_attn\.q_proj": 16}
    (many / WEIGHTS_FILE).rename(many / PICKLE_FILES[0])
    assert read(children, many, allow_pickle=True).adapter.weights is None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"use_dora": True}, IncompatibleAdapter),
        ({"r": "4"}, InvalidAdapter),
        (None, AdapterNotFound),
    ],
)
def test_its_errors_are_those_of_verification(
    children: Children, tmp_path: Path, change: dict[str, object] | None, kind: type[Exception]
) -> None:
    directory = put(tmp_path / "sql", adapter_files(**(change or {})))
    if change is None:
        (directory / CONFIG_FILE).unlink()
    with pytest.raises(kind) as here:
        verify_adapter(directory, None, Settings())
    with pytest.raises(kind) as there:
        read(children, directory)
    assert there.value.plain() == here.value.plain()


def test_one_process_answers_one_after_the_other(children: Children, adapter: Path) -> None:
    children.warm()
    for _ in range(5):
        assert read(children, adapter)
    (pid,) = children.pids()
    assert psutil.Process(pid).ppid() == os.getpid()
    assert psutil.Process(pid).nice() > os.getpriority(os.PRIO_PROCESS, 0)


def test_the_memory_of_the_server_does_not_end_it(children: Children, adapter: Path) -> None:
    assert len(np.ones(64 << 20)) == 64 << 20  # half a GiB, which a process that it starts has for a moment
    for _ in range(3):
        assert read(children, adapter)
        pids = children.pids()
        assert read(children, adapter)
        assert children.pids() == pids != []


def test_neither_torch_nor_vllm_nor_variables_are_there(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_PLUGINS_ADMIN_KEY", "the-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    assert read(children, adapter)
    (pid,) = children.pids()
    assert "the-secret" not in str(psutil.Process(pid).environ())
    maps = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
    assert not [path for path in maps if "/torch/" in path or "/vllm/" in path]


def test_a_process_that_was_killed_is_replaced(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    (before,) = children.pids()
    os.kill(before, signal.SIGKILL)
    assert read(children, adapter)
    assert before not in children.pids()


def test_computing_too_long_is_refused(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "from lora_plugins.verification import child; child.cpu_s = lambda _: 0\n"
    program(monkeypatch, endless + "import itertools; child.verify_adapter = lambda *_: sum(itertools.count())")
    with pytest.raises(InvalidAdapter, match="takes too long to read"):
        read(children, adapter)
    assert children.pids() == []


def test_waiting_too_long_is_refused(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, HOLD)
    before = set(psutil.Process().children())
    monkeypatch.setattr(process, "wall_s", lambda _: 0.3)
    with pytest.raises(InvalidAdapter, match="more than 0 s to read"):
        read(children, adapter)
    assert set(psutil.Process().children()) <= before


def test_too_much_memory_is_refused(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern that took 8.5 GB in the server, with the count of repeats off."""
    program(monkeypatch, "from lora_plugins.adapter import patterns; patterns.MAX_REPEATS = 1 << 62")
    hostile = put(tmp_path / "bad", adapter_files(rank_pattern={"(?:(?:(?:a+){1000}){1000}){1000}": 8}))
    with pytest.raises(InvalidAdapter, match="memory"):
        read(children, hostile)
    assert read(children, put(tmp_path / "sql", adapter_files()))


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), 11)", "os._exit(3)", "ctypes.string_at(0)"])
def test_what_ends_the_process_is_refused(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    first = "import ctypes, os; from lora_plugins.verification import child"
    program(monkeypatch, f"{first}\nchild.verify_adapter = lambda *_: {end}")
    with pytest.raises(InvalidAdapter, match="ends the process that reads it"):
        read(children, adapter)


@pytest.mark.parametrize(
    "said",
    ["b'x' * 100", "framed(b'\\x80')", "framed(encode(Ready()))", "(1 << 30).to_bytes(4, 'little')", "b''"],
)
def test_other_answers_are_none(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    first = f"from lora_plugins.verification.child import *; from lora_plugins.verification import child\nsaid = {said}"
    program(
        monkeypatch,
        f"{first}\nchild._answer = lambda _: [1]\nchild._send_one = child._send\n"
        "child._send = lambda out, a: child._send_one(out, a) if isinstance(a, Ready) else out.write(said)\n"
        "child._MAX_KEPT_KIB = 0",
    )
    with pytest.raises(InvalidAdapter):
        read(children, adapter)


def test_a_slow_adapter_does_not_hold_another(
    children: Children, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(children, adapter)
    slow = put(tmp_path / "slow", adapter_files())
    (slow / CONFIG_FILE).unlink()
    program(monkeypatch, HOLD)
    (warm,) = children.pids()
    busy = children._idle.get_nowait()
    before = set(psutil.Process().children())
    waiting = children.read(slow, Settings())
    while not (started := set(psutil.Process().children()) - before):
        time.sleep(0.01)
    children._idle.put(busy)
    assert read(children, adapter)
    assert children.pids() == [warm]
    assert not waiting.done()
    for child in started:
        child.terminate()


def test_no_process_is_no_fault_of_the_adapter(
    children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, "import sys; sys.exit(5)")
    with pytest.raises(SourceUnavailable, match="ended with 5"):
        read(children, adapter)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SourceUnavailable, match="no process that reads adapters"):
        read(children, adapter)


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, adapter: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lora_plugins.settings import Settings\n"
        "from lora_plugins.verification.children import children\n"
        "made = children(); made.read(Path(sys.argv[1]), Settings()).result()\n"
        "print(*made.pids(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(adapter)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_limits_of_the_process_are_set(children: Children, adapter: Path) -> None:
    assert read(children, adapter)
    (pid,) = children.pids()
    found = psutil.Process(pid)
    assert found.rlimit(psutil.RLIMIT_DATA)[0] == limits.MAX_MEMORY_BYTES
    assert found.rlimit(psutil.RLIMIT_NOFILE)[0] == limits.MAX_FILES
    assert 0 < found.rlimit(psutil.RLIMIT_CPU)[0] < 60
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != limits.MAX_MEMORY_BYTES


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


def written(children: Children, directory: Path, target: Path) -> list[int]:
    conversion = verify_adapter(directory, BASE, Settings()).conversion
    assert conversion is not None
    landed: list[int] = []
    children.write(tensors_of(conversion), directory, target, landed.append).result(120)
    write_weights(
        tensors_of(conversion), lambda file: directory / (file or WEIGHTS_FILE), target.with_name("here"), landed.append
    )
    return landed


@pytest.mark.parametrize("files", [sharded(adapter_files()), NAMED], ids=["several files", "a name in keys"])
def test_it_converts_as_this_process_does(children: Children, tmp_path: Path, files: dict[str, bytes]) -> None:
    landed = written(children, put(tmp_path / "sql", files), tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert landed[-1] == (tmp_path / "here").stat().st_size


def test_every_move_crosses() -> None:
    array = np.arange(24, dtype="<u4").reshape(4, 6)
    rows = (0, 4, 2)
    for move in (
        Same(),
        Rows(1, 2),
        Stacked(),
        Zeros((2, 3)),
        OnDiagonal((8, 12), ((0, 4, 0, 6),)),
        ColumnsOfExpert(1, 2, rows),
        StackedA((2, 4, 6), ((1, 0),), 4),
        StackedB((4, 6, 2), ((1, 0, (0, 4, 1)),), 6),
    ):
        info = TensorInfo("a", "F32", (1, 1), 0, 4)
        sent = encode(Tensors((NewTensor(info, (info,), move),)))
        (again,) = decode_request.decode(sent).tensors
        assert again.make == move
        assert np.array_equal(again.make([array]), move([array]))


def test_a_full_disk_stays_an_error_of_the_disk(children: Children, tmp_path: Path) -> None:
    directory = put(tmp_path / "sql", NAMED)
    with pytest.raises(FileNotFoundError):
        written(children, directory, tmp_path / "no" / "folder")
    with pytest.raises(OSError, match="No space left") as caught:
        written(children, directory, Path("/dev/full"))
    assert caught.value.errno == errno.ENOSPC
    assert read(children, directory)
