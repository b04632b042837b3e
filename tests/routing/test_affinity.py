"""The routing policy: where requests go, and what holds whatever comes."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from lora_plugins.routing.affinity import AffinityPolicy, Limits
from lora_plugins.routing.residency import GRACE_S, Report, Residency, Tier


def of(count, limits=None, capacity=None):
    policy = AffinityPolicy(limits)
    for number in range(count):
        policy.join(f"r{number}")
        if capacity is not None:
            policy.reported(f"r{number}", Report({}, capacity), 0.0)
    return policy


def send(policy, adapter, now_s=0.0, *, completes=True):
    replica = policy.ranked(adapter, now_s)[0]
    policy.routed(adapter, replica, now_s)
    if completes:
        policy.completed(adapter, replica, now_s)
    return replica


def test_adapter_stays_where_it_was_first_sent():
    policy = of(10)
    assert {send(policy, "sql") for _ in range(20)} == {next(policy._hashing.walk("sql"))}


def test_slot_is_preferred_to_host_cache_and_that_to_files():
    policy = of(6)
    for replica, tier in (("r1", Tier.STORE), ("r2", Tier.HOST), ("r3", Tier.SLOT)):
        policy.reported(replica, Report({"sql": tier}, 5), 0.0)
    assert policy.ranked("sql", 0.0)[:2] == ["r3", "r2"]
    policy.leave("r3")
    policy.leave("r2")
    assert policy.ranked("sql", 0.0)[0] == "r1"


def test_adapters_fill_all_room_before_any_is_evicted():
    policy = of(2, capacity=12)
    assert Counter(send(policy, f"adapter-{number}") for number in range(24)) == {"r0": 12, "r1": 12}
    before = {number: policy.ranked(f"adapter-{number}", 0.0)[0] for number in range(24)}
    assert {number: send(policy, f"adapter-{number}") for number in range(24)} == before


def test_requests_wait_where_their_adapter_is_already_loading():
    policy = of(10, capacity=1)
    first = send(policy, "sql", completes=False)
    assert send(policy, "sql", completes=False) == first


def test_hot_adapter_spills_over_instead_of_queueing():
    policy = of(10, Limits(least_bound=4))
    sent = Counter(send(policy, "sql", completes=False) for _ in range(12))
    assert sent[next(policy._hashing.walk("sql"))] == 4
    assert len(sent) == 3


def test_loaded_adapter_spills_over_too():
    policy = of(10, Limits(least_bound=4))
    home = send(policy, "sql")
    sent = Counter(send(policy, "sql", completes=False) for _ in range(6))
    assert (sent[home], len(sent)) == (4, 2)


def test_sustained_load_warms_a_second_replica_by_one_request():
    policy = of(10, Limits(per_replica=2, least_bound=100))
    home = send(policy, "sql")
    in_flight = [send(policy, "sql", 1.0, completes=False) for _ in range(4)]
    assert set(in_flight) == {home}
    later = [send(policy, "sql", 30.0, completes=False) for _ in range(3)]
    assert later[0] != home
    assert later[1:] == [home, home]  # until the second one has it
    policy.completed("sql", later[0], 30.5)
    assert {send(policy, "sql", 30.5, completes=False) for _ in range(4)} == {later[0]}  # it has fewer requests


def test_replica_that_joins_takes_no_adapter_that_is_loaded():
    policy = of(5, capacity=50)
    before = {f"adapter-{number}": send(policy, f"adapter-{number}") for number in range(200)}
    policy.join("r5")
    assert {adapter: policy.ranked(adapter, 0.0)[0] for adapter in before} == before


def test_replica_that_leaves_moves_only_its_own():
    policy = of(5, capacity=100)
    before = {f"adapter-{number}": send(policy, f"adapter-{number}") for number in range(200)}
    policy.leave("r2")
    after = {adapter: policy.ranked(adapter, 0.0)[0] for adapter in before}
    assert {adapter for adapter in before if after[adapter] != before[adapter]} == {
        adapter for adapter, replica in before.items() if replica == "r2"
    }


def test_base_model_goes_to_a_replica_with_few_requests():
    policy = of(3)
    sent_to = Counter(send(policy, "", completes=False) for _ in range(30))
    assert sent_to == {"r0": 10, "r1": 10, "r2": 10}


def test_excluded_replicas_are_left_out():
    policy = of(0)
    for replica in ("a", "b", "c"):
        policy.join(replica)
    for adapter in ("", "sql"):
        assert set(policy.ranked(adapter, 0.0, {"a", "b"})) == {"c"}
        assert not policy.ranked(adapter, 0.0, {"a", "b", "c"})


def test_replica_leaves_and_joins_again():
    policy = of(0)
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
    policy.routed("", "b", 1.0)
    assert policy.ranked("", 1.0)[0] == "a", "what it had before counts no longer"


ADAPTERS = st.sampled_from(["", "\ud800", *(f"adapter-{number}" for number in range(8))])
REPLICAS = st.sampled_from([f"r{number}" for number in range(6)])
TIERS = st.sampled_from([Tier.SLOT, Tier.HOST, Tier.STORE])


class AnyHistory(RuleBasedStateMachine):
    """Whatever comes: a request has a replica below the bound, and what is known of replicas agrees with itself."""

    def __init__(self):
        super().__init__()
        self.policy = AffinityPolicy(Limits(per_replica=1, least_bound=2, cool_down_s=5.0))
        self.there = set()
        self.running = []
        self.now = 0.0

    @rule(replica=REPLICAS)
    def join(self, replica):
        self.policy.join(replica)
        self.there.add(replica)

    @rule(replica=REPLICAS)
    def leave(self, replica):
        self.policy.leave(replica)
        self.there.discard(replica)

    @rule(adapter=ADAPTERS, excluded=st.sets(REPLICAS, max_size=2))
    def send(self, adapter, excluded):
        ranked = self.policy.ranked(adapter, self.now, excluded)
        assert bool(ranked) == bool(self.there - excluded)
        assert set(ranked) <= self.there - excluded
        assert len(set(ranked)) == len(ranked)
        if not ranked:
            return
        bound = self.policy.bound()
        under = [replica for replica in self.there - excluded if self.policy._load.of(replica) < bound]
        if adapter and under:
            assert self.policy._load.of(ranked[0]) + 1 <= bound
        if not excluded:
            assert under
        self.policy.routed(adapter, ranked[0], self.now)
        self.running.append((adapter, ranked[0]))

    @rule(data=st.data())
    def complete(self, data):
        if self.running:
            adapter, replica = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.policy.completed(adapter, replica, self.now)

    @rule(
        replica=REPLICAS,
        adapters=st.dictionaries(ADAPTERS.filter(bool), TIERS, max_size=5),
        capacity=st.none() | st.integers(0, 5),
        requests=st.none() | st.integers(0, 9),
    )
    def report(self, replica, adapters, capacity, requests):
        self.policy.reported(replica, Report(adapters, capacity, requests), self.now)
        if replica in self.there:
            where = {name: self.policy._residency.of(name).get(replica) for name in adapters}
            assert all(where[name] is tier for name, tier in adapters.items() if tier <= Tier.HOST)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 100.0]))
    def wait(self, seconds):
        self.now += seconds


TestAnyHistory = AnyHistory.TestCase


def sent(residency, adapter, now_s=0.0):
    """A request for it, from its beginning to its end."""
    residency.routed(adapter, "a", now_s)
    residency.completed(adapter, "a")


def residency_of(capacity):
    residency = Residency()
    residency.join("a")
    residency.reported("a", Report({}, capacity), 0.0)
    return residency


def test_reports_correct_what_requests_suggested():
    residency = residency_of(10)
    sent(residency, "sql")
    residency.reported("a", Report({}, 10), 1.0)  # may be older than the request
    assert residency.of("sql") == {"a": Tier.HOST}
    residency.reported("a", Report({}, 10), 1.0 + GRACE_S)
    assert residency.of("sql") == {}


def test_without_reports_least_recently_used_adapter_is_taken_for_evicted():
    residency = residency_of(2)
    for adapter in ("a", "b", "a", "c"):
        sent(residency, adapter)
    assert [bool(residency.of(adapter)) for adapter in ("a", "b", "c")] == [True, False, True]


def test_an_adapter_loads_until_its_first_request_has_ended():
    residency = residency_of(2)
    residency.routed("sql", "a", 0.0)
    assert residency.of("sql") == {"a": Tier.LOADING}
    residency.completed("sql", "a")
    assert residency.of("sql") == {"a": Tier.HOST}


def test_files_are_where_reports_say_until_the_replica_leaves():
    residency = residency_of(2)
    residency.reported("a", Report({"sql": Tier.STORE}), 0.0)
    assert residency.stored("sql") == {"a"}
    residency.leave("a")
    assert residency.stored("sql") == set()
