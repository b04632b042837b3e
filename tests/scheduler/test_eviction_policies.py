"""Policies: each against a model too plain to be wrong, and none that names what it must not."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_plugins.scheduler.eviction_policies import POLICIES, Lrfu, Lru, make_policy
from lora_plugins.settings import HOST_POLICIES
from tests.repetitions import times

KEYS = st.integers(0, 9)
SIZES = st.sampled_from([1, 7, 5_000_000, 80_000_000, 600_000_000])
COSTS = st.sampled_from([0.0, 0.001, 0.05, 0.6, 30.0])
STEPS = times(20_000, short=3_000)
EVERY = pytest.mark.parametrize("name", HOST_POLICIES)


class Everything:
    """Contains every key."""

    def __contains__(self, key):
        return True


ALL = Everything()


def filled(policy, *keys, size=100, cost=1.0):
    for key in keys:
        policy.added(key, size, cost)
    return policy


def drained(policy):
    """Everything in the order in which it is evicted, which is named beforehand."""
    named = list(policy.victims(ALL))
    order = []
    while (key := next(policy.victims(ALL), None)) is not None:
        order.append(key)
        policy.removed(key)
    assert order == named
    return order


class NaiveLru:
    """An OrderedDict, first out first."""

    def __init__(self):
        self.keys = OrderedDict()

    def added(self, key, size, cost):
        self.keys.pop(key, None)
        self.keys[key] = True

    def used(self, key):
        if key in self.keys:
            self.keys.move_to_end(key)

    def removed(self, key):
        self.keys.pop(key, None)

    def victim(self, among):
        return next((key for key in self.keys if key in among), None)


class NaiveLrfu:
    """Every rank computed again, as a sum over the whole history: as in the paper, nothing in logarithms."""

    def __init__(self):
        self.keys = {}  # key: what its rank is made of
        self.now, self.tick = 0.0, 0
        self.history = {}

    def removed(self, key):
        self.keys.pop(key, None)

    def used(self, key):
        if key in self.keys:
            self.touch(key)

    def added(self, key, size, cost):
        self.keys[key] = {"density": min(max(cost, 1e-6), 1e6) / max(size, 1)}
        self.touch(key)

    def touch(self, key):
        self.tick += 1
        self.keys[key]["tick"] = self.tick
        self.now += 1 / (3 * len(self.keys))
        self.history.setdefault(key, []).append(self.now)

    def victim(self, among):
        ranked = sorted((self.rank(key), entry["tick"], key) for key, entry in self.keys.items() if key in among)
        return ranked[0][2] if ranked else None

    def rank(self, key):
        return sum(2 ** (at - self.now) for at in self.history[key]) * self.keys[key]["density"]


class AnyPolicy(RuleBasedStateMachine):
    """A policy beside its model, under any order of events."""

    policy: object
    model: object

    def __init__(self):
        super().__init__()
        self.subject, self.beside, self.there = self.policy(), self.model(), set()

    @rule(key=KEYS, size=SIZES, cost=COSTS)
    def add(self, key, size, cost):
        self.subject.added(key, size, cost)
        self.beside.added(key, size, cost)
        self.there.add(key)

    @rule(key=KEYS)
    def use(self, key):
        self.subject.used(key)
        self.beside.used(key)

    @rule(key=KEYS)
    def remove(self, key):
        self.subject.removed(key)
        self.beside.removed(key)
        self.there.discard(key)

    @rule(evictable=st.sets(KEYS))
    def ask(self, evictable):
        victim, expected = next(self.subject.victims(evictable), None), self.beside.victim(evictable)
        assert (victim is None) == (not evictable & self.there)
        assert victim is None or victim in evictable & self.there
        self.compare(victim, expected)

    @precondition(lambda self: self.there)
    @rule(pinned=st.sets(KEYS, max_size=3))
    def evict(self, pinned):
        victim = next(self.subject.victims(self.there - pinned), None)
        self.compare(victim, self.beside.victim(self.there - pinned))
        if victim is not None:
            self.remove(victim)

    def compare(self, victim, expected):
        assert victim == expected

    @invariant()
    def counts_what_is_there(self):
        assert set(self.subject.victims(Everything())) == set(self.there)


class LruMachine(AnyPolicy):
    policy, model = Lru, NaiveLru


class LrfuMachine(AnyPolicy):
    policy, model = Lrfu, NaiveLrfu

    def compare(self, victim, expected):
        if victim != expected:  # the same value, summed in another order
            ranks = [self.beside.rank(key) for key in (victim, expected)]
            assert math.isclose(*ranks, rel_tol=1e-9)


TestLru, TestLrfu = LruMachine.TestCase, LrfuMachine.TestCase


@EVERY
@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("size", [0, -5, 10**15])
def test_figures_that_cannot_be_break_nothing(name, size, cost):
    policy = filled(make_policy(name), "odd", size=size, cost=cost)
    filled(policy, "a", "b")
    assert sorted(drained(policy)) == ["a", "b", "odd"]


@EVERY
def test_keys_need_no_order_among_themselves(name):
    keys = ["a", 1, ("t",), None.__class__]
    assert drained(filled(make_policy(name), *keys)) == keys


def entries(thing):
    """How many entries all containers of a policy hold together."""
    total = 0
    for value in vars(thing).values():
        if isinstance(value, dict | list):
            total += len(value)
        elif hasattr(value, "__dict__"):
            total += entries(value)
    return total


@EVERY
def test_bookkeeping_follows_what_is_there(name):
    policy = make_policy(name)
    for key in range(STEPS):
        policy.added(key, 100, 1.0)
        policy.used(key)
        if key >= 50:
            policy.removed(key - 50)
    remembered = len(getattr(policy, "_evicted", ()))
    assert entries(policy) - remembered <= 10 * 50
    assert remembered <= Lrfu.REMEMBERED


@EVERY
def test_bookkeeping_does_not_grow_by_uses_or_questions(name):
    policy = filled(make_policy(name), *range(20))
    for step in range(STEPS):
        policy.used(step % 20)
        next(policy.victims({step % 20}), None)
    assert entries(policy) <= 10 * 20


def test_lrfu_evicts_large_and_cheap_before_small_and_expensive():
    policy = Lrfu()
    policy.added("small", 5_000_000, 0.1)
    policy.added("large", 600_000_000, 0.1)
    policy.added("cheap", 5_000_000, 0.01)
    assert drained(policy) == ["large", "cheap", "small"]


def test_lrfu_evicts_a_past_favourite_at_last():
    policy = filled(Lrfu(), "favourite")
    for _ in range(50):
        policy.used("favourite")
    filled(policy, *range(4))
    evicted = []
    for key in range(4, 4000):
        for _ in range(2):
            policy.used(key - 1)
        evicted.append(next(policy.victims(ALL), None))
        policy.removed(evicted[-1])
        policy.added(key, 100, 1.0)
    assert evicted[0] != "favourite"
    assert "favourite" in evicted


def test_lrfu_knows_an_adapter_that_comes_back():
    policy = filled(Lrfu(), "regular")
    policy.used("regular")
    policy.removed("regular")
    filled(policy, "regular", "newcomer")
    assert next(policy.victims(ALL), None) == "newcomer"


def test_lrfu_keeps_its_hot_set_through_a_scan():
    left = {}
    for name in ("lru", "lrfu"):
        policy = filled(make_policy(name), *range(10))
        for step in range(100):
            policy.used(step % 10)
        for scanned in range(100, 120):
            policy.removed(next(policy.victims(ALL), None))
            policy.added(scanned, 100, 1.0)
        left[name] = len([key for key in drained(policy) if key < 10])
    assert left == {"lru": 0, "lrfu": 9}


def test_lrfu_forgets_the_first_evicted_beyond_its_memory():
    policy = Lrfu()
    for key in range(Lrfu.REMEMBERED + 5):
        policy.added(key, 100, 1.0)
        policy.removed(key)
    assert (len(policy._evicted), 4 in policy._evicted, 5 in policy._evicted) == (Lrfu.REMEMBERED, False, True)


@given(st.lists(KEYS, min_size=1, max_size=60), st.floats(0.1, 1000))
def test_any_half_life_gives_each_key_once(uses, half_life):
    policy = Lrfu(half_life)
    for key in uses:
        if key in policy._uses:
            policy.used(key)
        else:
            policy.added(key, 100, 1.0)
    assert sorted(drained(policy)) == sorted(set(uses))


def test_policies_are_those_of_the_setting():
    assert tuple(POLICIES) == HOST_POLICIES
    assert [type(make_policy(name)) for name in ("lru", "lrfu")] == [Lru, Lrfu]
    assert make_policy("lru") is not make_policy("lru")
