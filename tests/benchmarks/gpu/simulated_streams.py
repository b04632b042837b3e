"""The programs for a GPU, on streams by a simulation in which work waits until somebody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.device import Rehearsal, Run
from tests.simulated_streams import SimulatedStreams


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
        with streams.in_place_of_cuda():
            yield
        self.simulated = None
