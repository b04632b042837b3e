"""What the programs need of the device: graphs, times, facts. A rehearsal has the same without a GPU.

`Gpu` is CUDA. `Rehearsal` computes on the CPU in Triton's interpreter, keeps a graph as the call itself, and does at
once what a stream is given. It proves that programs run, and nothing about a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.vllm import CARRIED

ROUNDS = 5
_CYCLES_PER_US = 2000  # of an H100 or H200 at full speed; below that a sleep takes longer

Run = Callable[[], None]


class Gpu:
    """The GPU at hand."""

    rehearsal = does_all_at_once = False

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("there is no GPU here; --rehearse runs without one, and measures nothing")
        self.torch, self.dtype = torch, torch.bfloat16
        self.device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(self.device)
        self.capability = major * 10 + minor

    @property
    def architecture(self) -> str:
        """As tuning tables are named."""
        return f"sm_{self.capability}"

    def facts(self) -> dict[str, object]:
        """What the device is, for the result."""
        import triton

        properties = self.torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_free_bytes": self.torch.cuda.mem_get_info(self.device)[0],
            "gpu_processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": self.torch.version.cuda,
            "torch": self.torch.__version__,
            "triton": triton.__version__,
        }

    def table(self, asked: Path | None = None) -> Any:
        """The tuning table that was asked for, or that was carried here for this GPU, or the package's."""
        from lora_plugins.kernels import tuning

        carried = CARRIED / f"{self.architecture}.json"
        if asked or carried.is_file():
            return tuning.read_table(asked or carried)
        return tuning.load_table(self.architecture)

    def captured(self, call: Run, *, warm: bool = True) -> Run:
        """The call in a CUDA graph, after it has run outside of one; returns what replays it."""
        cuda = self.torch.cuda
        if warm:
            side = cuda.Stream()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                call()
            cuda.current_stream().wait_stream(side)
            cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        replay: Run = graph.replay
        return replay

    def us(self, runs: dict[str, Run], calls_per_run: int = 1, rounds: int = ROUNDS) -> dict[str, float]:
        """Microseconds of one call of each; medians of rounds that are taken in turn."""
        took: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(rounds):
            for name, run in runs.items():
                took[name].append(self._us(run) / calls_per_run)
        return {name: median(values) for name, values in took.items()}

    def _us(self, run: Run) -> float:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def enqueue(self, work: Run) -> None:
        """Have the current stream do this after all that it was given before."""
        work()

    def sleep(self, us: float) -> None:
        """Have the current stream do nothing for about this long."""
        self.torch.cuda._sleep(int(us * _CYCLES_PER_US))

    def synchronize(self) -> None:
        """Wait for everything, and raise what went wrong."""
        self.torch.cuda.synchronize()

    def has_room_for(self, size_bytes: int) -> bool:
        """Whether so much can be allocated, with a few GiB to spare for all else."""
        return bool(self.torch.cuda.mem_get_info(self.device)[0] > size_bytes + (4 << 30))

    def empty_cache(self) -> None:
        """Release memory that no tensor has."""
        self.torch.cuda.empty_cache()

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Where product code may ask torch for streams and events."""
        yield


class Rehearsal(Gpu):
    """No GPU: everything on the CPU, at once."""

    rehearsal = does_all_at_once = True
    capability = 90

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = torch.device("cpu")
        self.dtype = torch.float16  # Triton's interpreter (3.6) has no product of bfloat16, and vLLM's kernels need one

    def facts(self) -> dict[str, object]:
        import triton

        return {"gpu": "none: a rehearsal", "torch": self.torch.__version__, "triton": triton.__version__}

    def table(self, asked: Path | None = None) -> Any:
        """One plan of few large programs, which is what the interpreter is quickest with."""
        from lora_plugins.kernels.tuning import ExpandTile, Plan, ShrinkTile, Table

        shrink = ShrinkTile(rank=64, columns=128, splits=1, rank_programs=1)
        return Table("rehearsal", (Plan(16, shrink, ExpandTile(rank=64, columns=64)),))

    def captured(self, call: Run, *, warm: bool = True) -> Run:
        call()
        return call

    def us(self, runs: dict[str, Run], calls_per_run: int = 1, rounds: int = 1) -> dict[str, float]:
        took = {}
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            took[name] = (time.perf_counter() - begin) * 1e6 / calls_per_run
        return took

    def sleep(self, us: float) -> None: ...

    def synchronize(self) -> None: ...

    def has_room_for(self, size_bytes: int) -> bool:
        return size_bytes < 1 << 30

    def empty_cache(self) -> None: ...

    @contextmanager
    def streams(self) -> Iterator[None]:
        from unittest import mock

        at_once = mock.Mock(wait_event=lambda event: None)
        replaced = dict.fromkeys(("Stream", "Event", "current_stream"), lambda *_, **__: at_once)
        with mock.patch.multiple(self.torch.cuda, stream=nullcontext, **replaced):
            yield


def device(*, rehearse: bool) -> Gpu:
    """The GPU, or what takes its place in a rehearsal; call it before anything imports Triton."""
    if not rehearse:
        return Gpu()
    os.environ["TRITON_INTERPRET"] = "1"
    return Rehearsal()
