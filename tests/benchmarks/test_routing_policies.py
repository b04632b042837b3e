"""The policies that the routing benchmark compares with: whatever comes, they name a replica that is there."""

from __future__ import annotations

import pytest

from benchmarks.routing_policies import BoundedConsistentHashing, PlainRendezvous, PowerOfTwo, RandomChoice
from lora_plugins.routing.residency import Report, Tier

POLICIES = [RandomChoice, PowerOfTwo, PlainRendezvous, BoundedConsistentHashing]


@pytest.mark.parametrize("make", POLICIES)
def test_excluded_replicas_are_left_out(make):
    policy = make()
    for replica in ("a", "b", "c"):
        policy.join(replica)
    for adapter in ("", "sql"):
        assert set(policy.ranked(adapter, 0.0, {"a", "b"})) == {"c"}
        assert not policy.ranked(adapter, 0.0, {"a", "b", "c"})


@pytest.mark.parametrize("make", POLICIES)
def test_replica_leaves_and_joins_again(make):
    policy = make()
    for replica in ("a", "b", "b"):
        policy.join(replica)
    policy.routed("sql", "a", 0.0)
    policy.leave("a")
    policy.leave("a")
    policy.completed("sql", "a", 1.0)
    policy.routed("sql", "a", 1.0)
    policy.reported("a", Report({"sql": Tier.SLOT}, 3, 3), 1.0)
    assert policy.ranked("sql", 1.0) == ["b"]
    policy.join("a")
    assert policy._load.of("a") == 0
