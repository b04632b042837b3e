"""What the soak's world reports to its oracle when something changes; a world that lies is found out."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.bank import CONFIG, WEIGHTS, Bank
from benchmarks.soak.oracle import Answer, Asked, Claim
from benchmarks.soak.run import _tell_wrongly
from benchmarks.soak.world import Name, World

NAME = 0  # on the filesystem
RNG = random.Random(1)


class Files(Bank):
    """A bank whose files say which version they are."""

    def files(self, adapter: int, version: int) -> dict[str, bytes]:
        return {CONFIG: b"{}", WEIGHTS: f"{adapter}-{version}".encode()}

    @property
    def versions_by_digest(self) -> dict[str, tuple[int, int]]:
        return {f"{adapter}-{version}": (adapter, version) for adapter, version, _, _ in self.answers}


def made(home: Path, **more: Any) -> tuple[World, Name]:
    answers = {(adapter, v, "text", 0): (adapter, v, 1) for adapter in (-1, NAME) for v in range(3)}
    world = World(Files(home, home, answers, list("abcd"), {}), home, None, None, **more)
    for directory in (world.root, world.allowed, home / "aside"):
        directory.mkdir()
    one = world.names[NAME]
    assert one.place == "filesystem"
    world._write(one, 0, RNG)
    world.oracle.of(one.name).open(world.told(one, 0), time.monotonic())
    return world, one


def judged(world: World, one: Name, version: int) -> str | None:
    """Of an answer with this version's weights, now."""
    now = time.monotonic()
    asked = Asked(one.name, one.adapter, "text", 0, 3, now, now)
    ids = world.bank.answers[one.adapter, version, "text", 0]
    return world.oracle.judge(asked, Answer(200, token_ids=ids, digest=f"{one.adapter}-{version}"))


def at_the_source(world: World, one: Name) -> str:
    return (world.root / one.name / WEIGHTS).read_text()


def test_what_is_published_may_be_served_beside_the_old_one(tmp_path: Path) -> None:
    world, one = made(tmp_path)
    assert judged(world, one, 1) is not None
    asyncio.run(world.publish(one, 1, RNG))
    assert at_the_source(world, one) == "0-1"
    assert world.valid(one) == {0, 1}


def test_what_the_server_says_ends_the_other_versions(tmp_path: Path) -> None:
    world, one = made(tmp_path)
    asyncio.run(world.publish(one, 1, RNG))
    world.serves(one, 1, may_change=True)
    assert world.valid(one) == {1}
    asyncio.run(world.publish(one, 2, RNG))
    world.serves(one, 1, may_change=True)
    assert world.valid(one) == {1, 2}, "the poller may swap to it at any time"
    world.serves(one, 1, may_change=False)
    assert world.valid(one) == {1}, "rolled back"


def test_a_version_that_is_held_stays_whatever_is_published(tmp_path: Path) -> None:
    world, one = made(tmp_path)
    world.serves(one, 0, may_change=False)
    one.is_held = True
    asyncio.run(world.publish(one, 1, RNG))
    assert world.valid(one) == {0}
    world.may_be_resolved(one)
    assert world.valid(one) == {0, 1}


@pytest.mark.parametrize("is_certain", [True, False])
def test_what_is_removed_is_absent_unless_it_is_registered(tmp_path: Path, is_certain: bool) -> None:
    world, one = made(tmp_path)
    one.is_certain = is_certain
    asyncio.run(world.remove(one))
    assert not (world.root / one.name).exists()
    now = time.monotonic()
    assert (Claim.ABSENT in world.oracle.of(one.name).during(now, now)) == (not is_certain)


def test_a_world_that_lies_about_a_version_is_found(tmp_path: Path) -> None:
    """The control `wrong-version`: the bytes at the source are right, and what the oracle hears of them is not."""
    world, one = made(tmp_path, told=_tell_wrongly)
    assert judged(world, one, 0) is not None
    asyncio.run(world.publish(one, 1, RNG))
    world.serves(one, 1, may_change=False)
    assert at_the_source(world, one) == "0-1"
    assert "its own version 1" in (judged(world, one, 1) or "")
