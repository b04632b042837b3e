"""CUDA's streams by a simulation in which work waits until somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.gpu.device import Rehearsal, Run


class WithStreams(Rehearsal):
    """A device that runs late: what it is given, it does when it is waited for."""

    does_all_at_once = False
    simulated: SimulatedStreams | None = None

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

    @contextmanager
    def streams(self) -> Iterator[None]:
        self.simulated = streams = SimulatedStreams()
        replaced = {
            "Stream": lambda device=None: streams.new(),
            "Event": lambda **_: SimulatedEvent(streams),
            "stream": streams.use,
            "current_stream": lambda device=None: streams.current,
        }
        with mock.patch.multiple(self.torch.cuda, **replaced):
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
