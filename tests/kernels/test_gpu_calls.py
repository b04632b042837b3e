"""One call of a machine with a GPU: its parts and their time, what is kept when it is cut off, streams, compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, which is for Linux only")
import torch

from benchmarks import gpu_cases, gpu_device, gpu_prepare, gpu_result, gpu_run, gpu_step, gpu_streams
from benchmarks.gpu_run import Part
from lora_plugins.kernels.triton_ops import operators

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_use() -> Iterator[None]:
    """Programs set the operators of the process; here others follow."""
    before = operators._operators
    yield
    operators._operators = before


def test_a_result_is_whole_after_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_result, "EVERY_S", 0.0)
    result = gpu_result.Result(tmp_path, "part", {"gpu": "one"}, rehearsal=False)
    for number in range(3):
        result.add({"row": number})
        found = json.loads((tmp_path / "part.json").read_text())
        assert (found["complete"], found["gpu"], len(found["rows"])) == (False, "one", number + 1)
        assert "rehearsal: not measured" not in found
    result.finish(goals=[])
    assert json.loads((tmp_path / "part.json").read_text())["complete"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["part.json"]


def test_a_rehearsal_says_so_in_name_and_content(tmp_path: Path) -> None:
    result = gpu_result.Result(tmp_path, "part", {}, rehearsal=True)
    assert result.path.name == "rehearsal_part.json"
    assert json.loads(result.path.read_text())["rehearsal: not measured"] is True


CUT_OFF = """
import sys, time
from pathlib import Path
from benchmarks import gpu_result
gpu_result.EVERY_S = 0.0
result = gpu_result.Result(Path(sys.argv[sys.argv.index("--out") + 1]), "slow", {}, rehearsal=False)
for number in range(1000):
    result.add({"row": number})
    time.sleep(0.02)
"""


def test_a_part_that_is_cut_off_leaves_its_rows(tmp_path: Path) -> None:
    began = time.monotonic()
    code = gpu_run.logged([sys.executable, "-c", CUT_OFF, "--out", str(tmp_path)], tmp_path / "slow.log", 8.0)
    assert code == 124
    assert time.monotonic() - began < 15
    found = json.loads((tmp_path / "slow.json").read_text())
    assert found["complete"] is False
    assert [row["row"] for row in found["rows"]] == list(range(len(found["rows"])))
    assert found["rows"]
    assert "row=0" in (tmp_path / "slow.log").read_text()


def test_a_limit_ends_what_a_part_started_too(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    log = tmp_path / "log"
    assert gpu_run.logged([sys.executable, "-c", code], log, 2.0) == 124
    pid = int(log.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_parts_share_the_time_and_one_that_fails_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def logged(command: list[str], log: Path, limit_s: float) -> int:
        asked.append((log.stem, float(command[command.index("--seconds") + 1])))
        assert limit_s == pytest.approx(asked[-1][1] + gpu_run.GRACE_S, abs=1)
        return int(log.stem == "one")

    monkeypatch.setattr(gpu_run, "logged", logged)
    result = gpu_result.Result(tmp_path, "run", {}, rehearsal=False)
    parts = (Part("one", 0.25), Part("two", 0.75))
    codes = gpu_run.run(parts, tmp_path, time.monotonic() + 100 + gpu_run.GRACE_S, result, rehearse=False)
    assert codes == [1, 0]
    assert asked == [("one", pytest.approx(25, abs=1)), ("two", pytest.approx(100, abs=2))]
    assert [row["exit_status"] for row in result.content["rows"]] == [1, 0]


def test_three_calls_fit_the_device_time_of_a_session() -> None:
    starts_s = 3 * 60
    assert sum(gpu_run.SECONDS.values()) + starts_s <= 30 * 60
    assert all(seconds <= 9 * 60 for seconds in gpu_run.SECONDS.values())
    for parts in gpu_run.CALLS.values():
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert 2 * len(parts) + 2 <= 8  # files that come back: a result and a log for each, the run's, a table
        for part in parts:
            assert (ROOT / "benchmarks" / f"{part.module}.py").is_file()


def test_documented_commands_fit_and_begin_the_three_calls() -> None:
    page = (ROOT / "docs" / "explanation" / "kernels-gpu.md").read_text()
    for call in gpu_run.CALLS:
        lines = [line.strip() for line in page.splitlines() if f"benchmarks.gpu_run {call}" in line]
        assert len(lines) == 1
        assert len(lines[0]) <= 2000
    assert '".cache/gpu"' in page


def test_simulated_streams_keep_order_and_wait_for_events() -> None:
    gpu = gpu_device.Rehearsal()
    with gpu.streams():
        done: list[str] = []
        side, ready = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(side):
            gpu.sleep(100)
            gpu.enqueue(lambda: done.append("copy"))
            ready.record()
        gpu.enqueue(lambda: done.append("before"))
        torch.cuda.current_stream().wait_event(ready)
        gpu.enqueue(lambda: done.append("after"))
        assert done == []
        gpu.synchronize()
        assert done == ["before", "copy", "after"]
    assert not hasattr(torch.cuda.Stream, "work")


@pytest.mark.slow
def test_writes_beside_a_graph_change_nothing_and_controls_fail(
    in_use: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_device.Rehearsal()
    monkeypatch.setattr(gpu_streams, "BUSY", 2)
    shape = gpu_streams.Shape(layers=1, n_in=16, widths=(16,), rows=9, steps=2, beside=1, sleep_us=50.0)
    result = gpu_result.Result(tmp_path, "streams", {}, rehearsal=True)
    assert gpu_streams.proved(shape, gpu, gpu.table(), result, time.monotonic() + 600)
    differ = {row["run"]: row["differ"] for row in result.content["rows"]}
    assert [count > 0 for count in differ.values()] == [False, False, False, True, True]


def test_streams_are_not_proved_where_a_wait_is_missing(
    in_use: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_plugins.worker.slot_stream import SlotStream

    def compute(world: gpu_streams.World) -> None:
        """Any sum over the slots of the batch: the interpreter takes long for the operator."""
        if world.batch.chunks._sorted.max() < gpu_streams.BUSY:
            world.y.fill_(1.0)
            return
        reserved = world.layers[0].lora_a_stacked[0][gpu_streams.BUSY :].float()
        world.y.copy_(reserved.sum().to(torch.bfloat16).expand_as(world.y))

    def cut(batch: operators.Batch, slots: torch.Tensor, *_: object, **__: object) -> None:
        batch.chunks._sorted.copy_(slots)

    monkeypatch.setattr(gpu_streams.World, "_compute", compute)
    monkeypatch.setattr(operators.Batch, "cut", cut)
    gpu = gpu_device.Rehearsal()
    shape = gpu_streams.Shape(layers=1, n_in=16, widths=(16,), rows=9, steps=3, beside=1, sleep_us=50.0)
    result = gpu_result.Result(tmp_path, "streams", {}, rehearsal=True)
    assert gpu_streams.proved(shape, gpu, gpu.table(), result, time.monotonic() + 600)
    monkeypatch.setattr(SlotStream, "wait_for", lambda self, event: None)
    assert not gpu_streams.proved(shape, gpu, gpu.table(), result, time.monotonic() + 600)


def test_a_step_with_adapters_is_the_model_of_their_sums(in_use: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_cases.MODELS, "Llama-8B", gpu_cases.TINY)
    gpu = gpu_device.Rehearsal()
    made = operators.Operators(gpu.table())
    operators.use(made)
    model = gpu_step.Model(gpu, 1)
    adapters = gpu_step.Adapters(model, gpu_step.Server(slots=2, slot_rank=16, rank=8, adapters=(1,)))
    x = torch.randn(3, 32).to(gpu.dtype)

    def plain(layer: int, part: str, y: torch.Tensor, x: torch.Tensor) -> None:
        stacks = adapters.stacks[layer][part]
        added = [(x @ a[0, 0].T) @ b[0, 0].T for a, b in zip(stacks.a[0], stacks.b[0], strict=True)]
        y += torch.cat(added, 1)

    ours, aside = adapters.ways(made, _NoVllm(), 3, 1)["ours"]
    assert aside is False
    want = model.step(x, plain).float()
    assert (model.step(x, ours).float() - want).norm() <= 3e-2 * want.norm()
    assert (model.step(x).float() - want).norm() > 0.06 * want.norm()


class _NoVllm:
    """Its calls are made and never called here."""

    def __init__(self) -> None:
        self.meta = self

    def captured_counts(self, slots: int) -> list[int]:
        return [slots]

    def make(self, *args: object, **kwargs: object) -> _NoVllm:
        return self

    def prepare_tensors(self, slots: object) -> None: ...

    def meta_args(self, rows: int, specialized: bool) -> tuple[()]:
        return ()


def test_step_goals_count_shares_of_base() -> None:
    rows = [{"adapters": 1, "rank": 16, "ours / base": share} for share in (0.96, 0.94)]
    one, four, sixteen = gpu_step.goals([*rows, {"adapters": 4, "rank": 64, "ours / base": 0.5}])
    assert (one["measured"], one["held"], one["worst"]) == (2, 1, 0.94)
    assert (four["measured"], sixteen["worst"]) == (0, None)


def test_the_carried_folder_has_the_empty_module(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    for name in (
        "vllm/lora/x.py",
        "vllm/_C.abi3.so",
        "vllm/model_executor/models/a.py",
        "vllm-0.33.0.dist-info/METADATA",
    ):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("")
    into = tmp_path / "gpu"
    (into / "vllm" / "old.py").parent.mkdir(parents=True)
    (into / "vllm" / "old.py").write_text("")
    (into / "sm_90.json").write_text("{}")
    gpu_prepare.copy_vllm(sources, into)
    found = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert found == {
        "vllm/lora/x.py",
        "vllm/_C_stable_libtorch.py",
        "vllm-0.33.0.dist-info/METADATA",
        "sm_90.json",
    }
    with pytest.raises(SystemExit, match="holds no vllm/lora"):
        gpu_prepare.copy_vllm(into / "vllm", tmp_path / "other")


def test_without_a_gpu_the_programs_refuse(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_streams", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no GPU here" in done.stderr
    assert not list(tmp_path.iterdir())


COMPILE_AHEAD = """
import sys, time
import torch
from benchmarks import gpu_compile, gpu_weights
from benchmarks.gpu_cases import Case
from lora_plugins.kernels import tuning
from lora_plugins.kernels.triton_ops import operators

def two_layers(table):
    case = Case("Llama-8B", "qkv", 64, 4, 16, 64)
    operators.use(made := operators.Operators(table))
    stacks = gpu_weights.make_stacks(case, 2, torch.bfloat16, "cpu", filled=False)
    call = gpu_weights.ours(made, case, stacks, gpu_weights.batch_of(case, "cpu"))
    for layer in range(2):  # the second one's ranks lie 12 bytes further
        call(layer, torch.empty(64, 6144, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16))

if __name__ == "__main__":
    table = tuning.read_table(tuning.PACKAGED / "default.json")
    for _ in range(2):
        with gpu_compile.Compilers(90, processes=1) as compilers:
            assert compilers.compile([(two_layers, (table,))], time.monotonic() + 600) == []
            print(compilers.compiled)
"""


@pytest.mark.slow
def test_kernels_are_compiled_ahead_for_an_absent_device(tmp_path: Path) -> None:
    """Each once, whichever layer calls it. In a process of its own: this one has Triton in its interpreter."""
    program = tmp_path / "compile_ahead.py"
    program.write_text(COMPILE_AHEAD)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["3", "0"]  # cut, shrink, expand; then all of them from the cache
    assert list((tmp_path / "cache").rglob("*.cubin"))
