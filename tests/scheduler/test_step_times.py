from __future__ import annotations

import pytest

from lora_plugins.scheduler.stats import StepTimes
from tests.scheduler.simulated import SimulatedEngine, SimulatedWorkers, make_planner


def stepping(step_s: float) -> StepTimes:
    times = StepTimes()
    for number in range(200):
        times.step_begins(number * step_s, is_running=True)
    return times


def test_a_copy_is_short_beside_the_step_it_saves() -> None:
    times = stepping(0.1)
    times.copied(1000, 0.02)
    assert times.is_short(1000, 4)
    assert not times.is_short(1000, 6)
    assert not times.is_short(2000, 4)
    assert times.is_short(10**9, 0), "nobody waits for it"


def test_nothing_is_short_before_a_copy_was_measured() -> None:
    assert not stepping(10.0).is_short(1, 1)


def test_the_time_between_batches_is_no_step() -> None:
    times = StepTimes()
    times.step_begins(0.0, is_running=True)
    times.step_begins(0.1, is_running=False)
    times.step_begins(500.0, is_running=True)
    times.copied(1, 0.01)
    assert not times.is_short(1, 1)


@pytest.mark.parametrize(("copy_s", "background"), [(0.001, 1), (0.2, 8)])
def test_short_copies_cost_their_adapter_no_step(copy_s: float, background: int) -> None:
    workers = SimulatedWorkers(activate_s=lambda _: copy_s, is_instant=lambda _: False)
    engine = SimulatedEngine(make_planner(slots=2), workers)
    engine.submit(9, tokens=400)
    engine.run(3)
    for key in range(1, 8):
        engine.submit(key, tokens=2)
        engine.run(1)
    assert engine.planner.stats.background_activations == background
    engine.finish()
