"""What the GPU programs need of the device: graphs, times, a queue, facts. A rehearsal has the same without a GPU.

`Gpu` is CUDA. `Rehearsal` computes on the CPU in Triton's interpreter, keeps a graph as the call itself, and plays
CUDA's streams by a simulation in which work waits until somebody waits for it. It proves that programs run, and nothing
about a GPU.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_vllm import CARRIED

ROUNDS = 5
_CYCLES_PER_US = 2000  # of an H100 or H200 at full speed; below that a sleep takes longer

Run = Callable[[], None]


class Gpu:
    """The GPU at hand."""

    rehearsal = False

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("there is no GPU here; --rehearse runs without one, and measures nothing")
        self.torch = torch
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.bfloat16
        major, minor = torch.cuda.get_device_capability(self.device)
        self.architecture = f"sm_{major}{minor}"
        self.capability = major * 10 + minor

    def facts(self) -> dict[str, object]:
        """What the device is, for the result."""
        import triton

        properties = self.torch.cuda.get_device_properties(self.device)
        free, _ = self.torch.cuda.mem_get_info(self.device)
        return {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_free_bytes": free,
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
        torch = self.torch
        if warm:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay() -> None:
            graph.replay()

        return replay

    def us(self, runs: dict[str, Run], calls_per_run: int, rounds: int = ROUNDS) -> dict[str, float]:
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
        free, _ = self.torch.cuda.mem_get_info(self.device)
        return bool(free > size_bytes + (4 << 30))

    def empty_cache(self) -> None:
        """Release memory that no tensor has."""
        self.torch.cuda.empty_cache()

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Where product code may ask torch for streams and events."""
        yield


class Rehearsal(Gpu):
    """No GPU: everything on the CPU, at once; work of `enqueue` as a device would have it that runs late."""

    rehearsal = True
    architecture, capability = "sm_90", 90

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = torch.device("cpu")
        self.dtype = torch.float16  # Triton's interpreter (3.6) has no product of bfloat16, and vLLM's kernels need one
        self.simulated: SimulatedStreams | None = None

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

    def us(self, runs: dict[str, Run], calls_per_run: int, rounds: int = 1) -> dict[str, float]:
        return {name: self._us(run) / calls_per_run for name, run in runs.items()}

    def _us(self, run: Run) -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6

    def enqueue(self, work: Run) -> None:
        if self.simulated is None:
            work()
        else:
            self.simulated.current.give(work)

    def sleep(self, us: float) -> None:
        if self.simulated is not None:
            self.simulated.current.sleep(us)

    def synchronize(self) -> None:
        if self.simulated is not None:
            self.simulated.run()

    def has_room_for(self, size_bytes: int) -> bool:
        return size_bytes < 1 << 30

    def empty_cache(self) -> None:
        pass

    @contextmanager
    def streams(self) -> Iterator[None]:
        from unittest import mock

        self.simulated = streams = SimulatedStreams()
        cuda = self.torch.cuda
        replaced = {
            "Stream": lambda device=None: streams.new(),
            "Event": lambda **_: SimulatedEvent(streams),
            "stream": streams.use,
            "current_stream": lambda device=None: streams.current,
        }
        with mock.patch.multiple(cuda, **replaced):
            yield
        self.simulated = None


class SimulatedStreams:
    """Streams and events of CUDA as queues; `run` does what was given, each stream in order, by simulated time."""

    def __init__(self) -> None:
        self.all: list[SimulatedStream] = []
        self.current = self.new()

    def new(self) -> SimulatedStream:
        stream = SimulatedStream()
        self.all.append(stream)
        return stream

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self) -> None:
        """Do all work there is: always that of the stream whose clock is furthest behind and which need not wait."""
        while any(stream.work for stream in self.all):
            ready = [stream for stream in self.all if stream.work and stream.ready()]
            if not ready:
                raise RuntimeError("streams wait for each other")
            min(ready, key=SimulatedStream.next_at).step()


class SimulatedStream:
    def __init__(self) -> None:
        self.work: deque[tuple[str, Any]] = deque()
        self.clock = 0.0

    def give(self, work: Run) -> None:
        self.work.append(("do", work))

    def sleep(self, us: float) -> None:
        self.work.append(("sleep", us))

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.recorded:
            self.work.append(("wait", event))

    def wait_stream(self, other: SimulatedStream) -> None:
        event = SimulatedEvent(None)
        event.recorded = True
        other.work.append(("record", event))
        self.wait_event(event)

    def ready(self) -> bool:
        what, of = self.work[0]
        return what != "wait" or of.at is not None

    def next_at(self) -> float:
        what, of = self.work[0]
        return max(self.clock, of.at) if what == "wait" else self.clock

    def step(self) -> None:
        what, of = self.work.popleft()
        match what:
            case "do":
                of()
                self.clock += 1.0
            case "sleep":
                self.clock += of
            case "record":
                of.at = self.clock
            case _:
                self.clock = max(self.clock, of.at)


class SimulatedEvent:
    """An event of CUDA; `synchronize` has the device do all that it was given, as some device would."""

    def __init__(self, streams: SimulatedStreams | None) -> None:
        self.streams = streams
        self.at: float | None = None
        self.recorded = False

    def record(self, stream: SimulatedStream | None = None) -> None:
        assert self.streams
        self.recorded, self.at = True, None
        (stream or self.streams.current).work.append(("record", self))

    def synchronize(self) -> None:
        assert self.streams
        self.streams.run()


def device(*, rehearse: bool) -> Gpu:
    """The GPU, or what takes its place in a rehearsal; call it before anything imports Triton."""
    if not rehearse:
        return Gpu()
    os.environ["TRITON_INTERPRET"] = "1"
    return Rehearsal()
