"""Planner, jobs and slot stream together, on a device that does each stream's work late, beside the other's."""

from __future__ import annotations

import logging
import random

import pytest

from lora_plugins.log import logger
from lora_plugins.scheduler.messages import Activate, Activated, AdapterSpec, Evict, Failed, Load
from tests.repetitions import times
from tests.scheduler.simulated import SimulatedEngine, make_planner
from tests.simulated_streams import SimulatedStreams
from tests.worker.late_worker import LAYERS, LateWorker

WORLDS, PART, STEPS, SLOTS, HOST, ADAPTERS = times(2000, short=150), 25, 60, 3, 5, 8


class World:
    """An engine with two batches in flight, whose clients ask, leave, and replace and remove adapters by chance."""

    def __init__(self, streams: SimulatedStreams, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        planner = make_planner(SLOTS, max_bytes=None, max_adapters=HOST, patience_s=0.2)
        # The times of copies mean nothing here: some are made before a step, and others beside.
        planner.state.times.is_short = lambda size_bytes, running: choose.random() < 0.35  # type: ignore[method-assign]
        self.worker = LateWorker(streams, SLOTS, seed, self.running)
        self.engine = SimulatedEngine(planner, self.worker, max_rows=8)  # type: ignore[arg-type]
        self.engine.is_watched = False
        self.versions = dict.fromkeys(range(1, ADAPTERS + 1), 1)

    def running(self) -> list[int]:
        return [self.engine.key_of(request) for request in self.engine.running.values()]

    def spec(self, engine_id: int) -> AdapterSpec:
        name = "bad" if self.choose.random() < 0.1 else f"adapter-{engine_id}"
        return AdapterSpec(engine_id, name, f"/{engine_id}/{self.versions[engine_id]}", size_bytes=100)

    def act(self) -> None:
        choose, engine, engine_id = self.choose, self.engine, self.choose.randint(1, ADAPTERS)
        match choose.choice(["ask", "ask", "ask", "ask", "leave", "replace", "remove", "nothing"]):
            case "ask":
                engine.submit(self.spec(engine_id), tokens=choose.randint(1, 4))
            case "leave" if engine.running or engine.held:
                engine.abort(choose.choice([*engine.running.values(), *engine.held.values()]))
            case "replace":
                self.versions[engine_id] += 1
                engine.planner.load(self.spec(engine_id), engine.now, moves=choose.random() < 0.7)
            case "remove":
                written = [it.spec.engine_id for it in engine.planner.state.jobs.values() if it.is_activating]
                self._remove(choose.choice(written or [engine_id]))

    def _remove(self, engine_id: int) -> None:
        """At once: nobody waits for the end of its requests, nor for that of the write of its slot."""
        for request in [*self.engine.running.values(), *self.engine.held.values()]:
            if request.spec.engine_id == engine_id:
                self.engine.abort(request)
        self.engine.planner.retire(engine_id, self.engine.now)

    def run(self) -> None:
        for step in range(STEPS):
            if step < STEPS - 10:
                self.act()
            self.engine.step()
            # As the scheduler answers requests whose slot a step could not write.
            for request in list(self.engine.running.values()):
                if not self.engine.planner.state.of_request[request.id].is_loaded:
                    self.engine.abort(request)


@pytest.mark.parametrize("first", range(0, WORLDS, PART))
def test_no_batch_reads_a_half_written_slot(first: int) -> None:
    instant = beside = 0
    for seed in range(first, first + PART):
        streams = SimulatedStreams()
        with streams.in_place_of_cuda():
            world = World(streams, seed)
            try:
                world.run()
            finally:
                world.worker.close()
        assert world.worker.wrong == [], f"seed {seed}"
        assert world.worker.reads > LAYERS * STEPS
        instant += world.engine.planner.stats.instant_activations
        beside += world.engine.planner.stats.background_activations
    assert min(instant, beside) > PART


def test_a_slot_is_reported_before_the_device_writes() -> None:
    """The device orders copy and batch: an adapter need not wait for the batches before its copy."""
    streams = SimulatedStreams()
    with streams.in_place_of_cuda():
        worker = LateWorker(streams, 1, 0, lambda: [1])
        try:
            worker.carry_out([Load(AdapterSpec(1, "good", "/1"), 1, 1)], 0.0)
            worker.jobs.reports()
            worker.carry_out([Activate(1, 0, 2)], 0.0)
            assert [type(report) for report in worker.jobs.reports()] == [Activated]
            assert len(streams.all) == 2
            assert all(stream.work for stream in streams.all), "nothing is done yet"
            worker.reports(0.0)
        finally:
            worker.close()
    assert worker.wrong == []
    assert worker.reads == LAYERS


@pytest.mark.parametrize("job", [None, 3], ids=["before a step", "beside batches"])
def test_half_a_write_spoils_neither_slot_nor_memory(job: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Its copies are launched: they end before the slot's next write, and before their memory is something else's."""
    caplog.set_level(logging.CRITICAL, logger=logger.name)  # a record of the error would keep the memory
    streams = SimulatedStreams()
    with streams.in_place_of_cuda():
        worker = LateWorker(streams, 1, 0, lambda: ())
        try:
            worker.carry_out([Load(AdapterSpec(1, "bad", "/1"), 1, 1), Load(AdapterSpec(2, "good", "/2"), 2, 2)], 0.0)
            worker.carry_out([Activate(1, 0, job)], 0.0)
            assert [type(report) for report in worker.jobs.reports()][-1:] == [Failed]
            worker.carry_out([Evict(1), Activate(2, 0)], 0.0)
            while streams.main.work and streams.main.ready():
                streams.main.step()  # the side stream is the last that does anything
            worker.reports(0.0)
        finally:
            worker.close()
    assert worker.wrong == []
    assert worker.reads == LAYERS
