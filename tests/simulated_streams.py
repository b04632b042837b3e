"""CUDA's streams by a simulation: each does its work in order, late, and beside the others."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

Work = Callable[[], Any]


class SimulatedStreams:
    """Streams and events of CUDA as queues, whose work is done by `run`, by simulated time, or by `step`, by chance."""

    def __init__(self) -> None:
        self.all: list[SimulatedStream] = []
        self.main = self.new()
        self._local = threading.local()

    @property
    def current(self) -> SimulatedStream:
        """The calling thread's stream."""
        stream: SimulatedStream = getattr(self._local, "stream", self.main)
        return stream

    def new(self) -> SimulatedStream:
        stream = SimulatedStream()
        self.all.append(stream)
        return stream

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def in_place_of_cuda(self) -> AbstractContextManager[Any]:
        return mock.patch.multiple(
            torch.cuda,
            Stream=lambda device=None: self.new(),
            Event=lambda **_: SimulatedEvent(self),
            stream=self.use,
            current_stream=lambda device=None: self.current,
            set_device=lambda device: None,
        )

    def run(self) -> None:
        """Do all work there is: always that of the stream whose clock is furthest behind and which need not wait."""
        while ready := self._ready():
            min(ready, key=SimulatedStream.next_at).step()

    def step(self, choose: random.Random) -> bool:
        """Do the next work of any stream that need not wait, of a fast one rather; return whether there was one."""
        ready = self._ready()
        if ready:
            choose.choices(ready, [stream.speed for stream in ready])[0].step()
        return bool(ready)

    def _ready(self) -> list[SimulatedStream]:
        busy = [stream for stream in self.all if stream.work]
        ready = [stream for stream in busy if stream.ready()]
        if busy and not ready:
            raise RuntimeError("streams wait for each other")
        return ready


class SimulatedStream:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.work: deque[tuple[str, Any]] = deque()
        self.clock = 0.0
        self.speed = 1.0

    def give(self, work: Work) -> None:
        self.work.append(("do", work))

    def sleep(self, us: float) -> None:
        self.work.append(("sleep", us))

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(None)
        event.recorded = True
        self.work.append(("record", event))
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.recorded:
            self.work.append(("wait", event))

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def ready(self) -> bool:
        what, of = self.work[0]
        return what != "wait" or of.query()

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

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        assert self.streams
        self.streams.run()
