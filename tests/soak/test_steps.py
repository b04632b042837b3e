"""A seed decides what every client does, and memory that grows is told from memory that does not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.soak.clients import ImpatientSteps, Steps
from benchmarks.soak.processes import Sample, growth_mb_per_min
from benchmarks.soak.world import SOURCES, _name

WORLD = SimpleNamespace(names=[_name(adapter, Path("/allowed")) for adapter in range(200)])


def steps(seed: int, client: int) -> list[object]:
    made = Steps(seed, client, WORLD, "base")
    return [made.next() for _ in range(200)]


def test_a_seed_replays_its_steps() -> None:
    assert steps(7, 3) == steps(7, 3)


@pytest.mark.parametrize(("seed", "client"), [(8, 3), (7, 4)])
def test_another_seed_or_client_takes_other_steps(seed: int, client: int) -> None:
    assert steps(seed, client) != steps(7, 3)


def test_steps_are_of_every_kind() -> None:
    taken = [step for client in range(12) for step in steps(1, client)]
    assert {one.route.name if one.route else "tokenize" for one in taken} >= {"tokenize", "responses stream", "chat"}
    assert any(one.leave_after_s is not None for one in taken)
    assert any(one.leave_after is not None for one in taken)
    assert {one.adapter for one in taken} >= {None, -1}


def test_an_impatient_client_leaves_and_waits_for_its_last_retry() -> None:
    made = ImpatientSteps(7, 12, WORLD, "base")
    for _ in range(50):
        *left, last = (step := made.next()).tries()
        assert 1 <= len(left) == step.gives_up
        assert all(one.leave_after_s is not None and one.leave_after_s <= 0.1 for one in left)
        assert (last.leave_after_s, last.is_retry) == (None, True)
        assert {(one.name, one.prompt) for one in (*left, last)} == {(step.name, step.prompt)}


def test_names_lie_in_four_sources_and_all_have_places() -> None:
    assert {one.source for one in WORLD.names} == set(SOURCES)
    assert {one.place for one in WORLD.names if one.uri} == {"filesystem", "s3", "hub"}
    assert len({one.name for one in WORLD.names}) == 200


def samples(mb_per_min: float, *, steps_mb: float = 0.0) -> list[Sample]:
    noise = random.Random(1)
    return [
        Sample(t, 800 + t * mb_per_min / 60 + (steps_mb if t > 700 else 0) + noise.uniform(-3, 3), 10, 10)
        for t in itertools.takewhile(lambda t: t < 1200, itertools.count(0, 2))
    ]


def test_growth_is_measured_through_noise() -> None:
    assert growth_mb_per_min(samples(5)) == pytest.approx(5, abs=0.3)
    assert growth_mb_per_min(samples(0)) == pytest.approx(0, abs=0.3)
