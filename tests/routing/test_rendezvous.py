"""Rendezvous hashing: the weights of a model too plain to be wrong, and who moves when replicas come and go."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.routing import rendezvous
from lora_plugins.routing.rendezvous import PROBES, Rendezvous, hashed

NAMES = st.text(min_size=1, max_size=12)
REPLICAS = st.lists(
    st.sampled_from([f"replica-{number}" for number in range(40)]), min_size=1, max_size=12, unique=True
)
ADAPTERS = [f"team-{number % 7}/adapter-{number}" for number in range(6000)]


def of(replicas):
    result = Rendezvous()
    for replica in replicas:
        result.add(replica)
    return result


def homes(hashing, adapters=ADAPTERS):
    return {adapter: next(hashing.walk(adapter)) for adapter in adapters}


points = functools.cache(rendezvous._points)


def distance(adapter, replica):
    """The weight of a pair, from its definition."""
    start, step = hashed(adapter)
    probes = [(start + number * step) % 2**64 for number in range(PROBES)]
    return min((point - probe) % 2**64 for point in points(replica) for probe in probes)


@given(REPLICAS, NAMES)
def test_order_is_that_of_fixed_weights_of_pairs(replicas, adapter):
    hashing = of(replicas)
    assert list(hashing.walk(adapter)) == sorted(replicas, key=lambda replica: distance(adapter, replica))


@given(REPLICAS, st.lists(NAMES, min_size=1, max_size=30), st.sampled_from(["newcomer", "replica-0"]))
def test_joining_and_leaving_move_nothing_between_other_replicas(replicas, adapters, newcomer):
    others = [replica for replica in replicas if replica != newcomer]
    if not others:
        return
    hashing = of(others)
    before = homes(hashing, adapters)
    hashing.add(newcomer)
    after = homes(hashing, adapters)
    assert all(after[adapter] in {before[adapter], newcomer} for adapter in adapters)
    hashing.remove(newcomer)
    assert homes(hashing, adapters) == before


@pytest.mark.parametrize("count", [2, 10, 100])
def test_moves_at_most_a_fifth_more_than_a_share(count):
    replicas = [f"replica-{number}" for number in range(count)]
    hashing = of(replicas)
    before = homes(hashing)
    moved = []
    for number in range(10):
        hashing.add(f"newcomer-{number}")
        moved.append(sum(home != before[adapter] for adapter, home in homes(hashing).items()) / len(ADAPTERS))
        hashing.remove(f"newcomer-{number}")
    assert 0.8 / (count + 1) <= sum(moved) / len(moved) <= 1.2 / (count + 1)


@pytest.mark.parametrize("count", [2, 3, 10, 30])
def test_shares_are_nearly_equal(count):
    shares = Counter(homes(of(f"replica-{number}" for number in range(count))).values())
    assert max(shares.values()) < 1.25 * len(ADAPTERS) / count


def test_no_replica_has_no_best():
    hashing = Rendezvous()
    assert list(hashing.walk("sql")) == []
    hashing.add("a")
    assert list(hashing.walk("sql")) == ["a"]
    hashing.remove("a")
    assert list(hashing.walk("sql")) == []


def test_every_process_chooses_the_same():
    program = (
        "from lora_plugins.routing.affinity import AffinityPolicy\n"
        "policy = AffinityPolicy()\n"
        "for number in range(20): policy.join(f'replica-{number}')\n"
        "print([list(policy.ranked(f'adapter-{number}', 0.0)) for number in range(50)])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert b"replica-" in said.pop()
