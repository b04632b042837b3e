"""The host tier: budgets hold at every moment, nothing that is needed goes, and refusals are right."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, NoFreeSlot, OutOfMemory
from lora_plugins.manager.host_tier import HostEntry, HostTier, Stage
from lora_plugins.manager.policies import Lru

BROKEN = InvalidAdapter("nothing that can be read")


class Evicted(list[int]):
    """Ids in the order in which they left."""


def tier_of(max_bytes: int | None = 100, max_adapters: int = 3) -> tuple[HostTier, Evicted]:
    evicted = Evicted()
    return HostTier(max_bytes, max_adapters, Lru(), evicted.append), evicted


def bring(tier: HostTier, adapter_id: int, size_bytes: int = 10) -> HostEntry:
    entry = tier.reserve(adapter_id, f"/{adapter_id}", size_bytes)
    tier.arrived(entry, f"model {adapter_id}", size_bytes, 0.1)
    return entry


def test_reserved_bytes_count_before_they_arrive() -> None:
    tier, _ = tier_of()
    entry = tier.reserve(1, "/1", 60)
    assert (tier.used_bytes, entry.stage, entry.model) == (60, Stage.STAGING, None)
    tier.arrived(entry, "model", 50, 0.1)
    assert (tier.used_bytes, entry.stage, entry.model) == (50, Stage.STAGED, "model")


def test_least_recently_used_goes_first() -> None:
    tier, evicted = tier_of()
    for adapter_id in (1, 2, 3):
        bring(tier, adapter_id)
    tier.used(1)
    bring(tier, 4)
    assert evicted == [2]
    assert tier.evictions == 1


def test_bytes_evict_as_many_as_needed() -> None:
    tier, evicted = tier_of(max_bytes=100, max_adapters=9)
    for adapter_id in range(5):
        bring(tier, adapter_id, 20)
    bring(tier, 9, 50)
    assert evicted == [0, 1, 2]
    assert tier.used_bytes == 90


def test_without_a_budget_only_their_number_counts() -> None:
    tier, evicted = tier_of(max_bytes=None, max_adapters=2)
    bring(tier, 1, 10**12)
    bring(tier, 2, 10**12)
    assert evicted == []
    bring(tier, 3)
    assert evicted == [1]


def test_leased_and_pinned_stay() -> None:
    tier, evicted = tier_of()
    for adapter_id in (1, 2, 3):
        bring(tier, adapter_id)
    tier.lease(1, "a")
    tier.pin(2)
    bring(tier, 4)
    assert evicted == [3]
    tier.lease(4, "a")
    with pytest.raises(NoFreeSlot):
        tier.reserve(5, "/5", 1)
    tier.release(1, "a")
    bring(tier, 5)
    assert evicted == [3, 1]


def test_a_lease_lasts_until_its_last_owner_releases_it() -> None:
    tier, _ = tier_of()
    bring(tier, 1)
    tier.lease(1, "a")
    tier.lease(1, "a")
    tier.lease(1, "b")
    tier.release(1, "a")
    assert tier.is_leased(1)
    tier.release(1, "b")
    assert not tier.is_leased(1)
    tier.release(1, "b")
    tier.release(99, "b")


def test_larger_than_the_budget_is_refused_and_evicts_nobody() -> None:
    tier, evicted = tier_of()
    bring(tier, 1)
    with pytest.raises(OutOfMemory, match="101 bytes"):
        tier.reserve(2, "/2", 101)
    assert evicted == []


def test_landed_larger_than_reserved_gets_its_room_from_settle() -> None:
    tier, evicted = tier_of()
    bring(tier, 1, 60)
    entry = tier.reserve(2, "/2", 40)
    tier.arrived(entry, "model", 80, 0.1)  # the staging thread evicts nobody
    assert (evicted, entry.stage, tier.used_bytes) == ([], Stage.STAGING, 100)
    assert tier.settle(2)
    assert not tier.settle(2), "it came once"
    assert (evicted, entry.stage, entry.model, tier.used_bytes) == ([1], Stage.STAGED, "model", 80)
    assert not tier.is_leased(2)


def test_landed_larger_than_all_that_may_go_fails_alone() -> None:
    tier, evicted = tier_of()
    bring(tier, 1, 60)
    tier.lease(1, "a")
    entry = tier.reserve(2, "/2", 40)
    tier.lease(2, "a")
    tier.arrived(entry, "model", 80, 0.1)
    assert not tier.settle(2)
    assert isinstance(entry.error, NoFreeSlot)
    assert (evicted, entry.stage, entry.model, tier.used_bytes) == ([], Stage.FAILED, None, 60)
    assert (tier.expected_bytes("/2", 40), tier.expected_bytes("/3", 40)) == (80, 40)


def test_landed_larger_than_the_budget_is_out_of_memory() -> None:
    tier, evicted = tier_of()
    bring(tier, 1, 10)
    entry = tier.reserve(2, "/2", 40)
    tier.arrived(entry, "model", 101, 0.1)
    tier.settle(2)
    assert isinstance(entry.error, OutOfMemory)
    assert evicted == []


def test_a_failed_one_stays_for_its_waiters_and_goes_with_the_last() -> None:
    tier, evicted = tier_of()
    entry = tier.reserve(1, "/1", 100)
    tier.lease(1, "a")
    tier.failed(entry, BROKEN)
    assert (tier.used_bytes, entry.error) == (0, BROKEN)
    tier.release(1, "a")
    assert tier.get(1) is None
    assert evicted == [1]


def test_what_nobody_waits_for_any_more_makes_room_first() -> None:
    tier, evicted = tier_of()
    bring(tier, 1)
    tier.failed(tier.reserve(2, "/2", 10), BROKEN)
    tier.reserve(3, "/3", 10)
    bring(tier, 4)
    bring(tier, 5)
    assert evicted == [2, 3]


def test_failing_after_it_was_staged_leaves_nothing_in_the_policy() -> None:
    tier, _ = tier_of(max_adapters=1)
    tier.failed(bring(tier, 1), BROKEN)  # its slot could not be filled
    tier.drop(1)
    bring(tier, 2)
    bring(tier, 3)
    assert tier.get(3) is not None


def test_late_news_of_a_replaced_one_is_not_the_new_ones() -> None:
    tier, _ = tier_of()
    old = tier.reserve(1, "/old", 10)
    new = tier.reserve(1, "/new", 10)
    tier.arrived(old, "old model", 10, 0.1)
    tier.failed(old, BROKEN)
    assert (new.stage, new.model, new.error) == (Stage.STAGING, None, None)
    tier.drop(1)
    tier.arrived(new, "new model", 10, 0.1)
    assert tier.get(1) is None


def test_a_second_try_keeps_the_leases_and_another_path_does_not() -> None:
    tier, _ = tier_of()
    tier.failed(tier.reserve(1, "/1", 10), BROKEN)
    tier.lease(1, "b")
    assert tier.reserve(1, "/1", 10).leases == {"b"}
    assert not tier.reserve(1, "/elsewhere", 10).leases


@pytest.mark.parametrize(("size_bytes", "error"), [(101, OutOfMemory), (60, NoFreeSlot)])
def test_what_cannot_be_replaced_stays(size_bytes: int, error: type[LoRAPluginsError]) -> None:
    tier, evicted = tier_of()
    old = bring(tier, 1, 50)
    bring(tier, 2, 50)
    tier.lease(1, "a")
    tier.lease(2, "a")
    with pytest.raises(error):
        tier.reserve(1, "/new", size_bytes)
    assert (tier.get(1), old.leases, evicted) == (old, {"a"}, [])


def test_a_replaced_one_gives_its_own_bytes_first() -> None:
    tier, evicted = tier_of()
    bring(tier, 1, 50)
    bring(tier, 2, 50)
    tier.reserve(1, "/new", 50)
    assert evicted == [1]
    bring(tier, 3, 0)
    tier.reserve(1, "/newer", 20)  # at the limit of their number
    assert evicted == [1, 1]


def test_a_removed_one_goes_with_its_last_lease() -> None:
    tier, evicted = tier_of()
    bring(tier, 1)
    tier.lease(1, "a")
    tier.pin(1)
    assert tier.remove(1)
    assert not tier.remove(1), "it is on its way out"
    assert (tier.staged(), evicted) == (set(), [])
    tier.release(1, "a")
    assert evicted == [1]
    assert not tier.remove(1)


def test_a_removed_one_that_is_asked_for_again_stays() -> None:
    tier, evicted = tier_of()
    bring(tier, 1)
    tier.lease(1, "a")
    tier.remove(1)
    tier.lease(1, "b")
    tier.release(1, "a")
    tier.release(1, "b")
    assert (tier.staged(), evicted) == ({1}, [])


def test_clear_keeps_what_is_leased_until_it_is_released() -> None:
    tier, evicted = tier_of()
    for adapter_id in (1, 2):
        bring(tier, adapter_id)
    tier.lease(1, "a")
    tier.clear()
    assert (evicted, tier.staged()) == ([2], set())
    tier.release(1, "a")
    assert evicted == [2, 1]


def test_clear_forgets_even_the_pinned() -> None:
    tier, evicted = tier_of()
    bring(tier, 1)
    tier.pin(1)
    tier.reserve(2, "/2", 10)
    tier.clear()
    assert (len(tier), tier.used_bytes, sorted(evicted)) == (0, 0, [1, 2])


IDS = st.integers(1, 6)
SIZES = st.integers(0, 120)
OWNERS = st.sampled_from(["a", "b"])


class TierMachine(RuleBasedStateMachine):
    """The tier beside the plainest model of what it should do; late news of dropped entries arrive too."""

    MAX_BYTES, MAX_ADAPTERS = 100, 3

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[int, set[str]] = {}
        self.pinned: set[int] = set()
        self.here: dict[int, HostEntry] = {}
        self.removed: set[int] = set()
        self.allowed: set[int] = set()  # whom the running step drops in so many words
        self.staging: list[HostEntry] = []
        self.tier = HostTier(self.MAX_BYTES, self.MAX_ADAPTERS, Lru(), self._on_evict)

    def _on_evict(self, adapter_id: int) -> None:
        assert adapter_id in self.here, "told twice, or of one that was never here"
        if adapter_id not in self.allowed:
            assert self._may_go(adapter_id)
        del self.here[adapter_id]
        self.leases.pop(adapter_id, None)
        self.pinned.discard(adapter_id)
        self.removed.discard(adapter_id)

    def _may_go(self, adapter_id: int) -> bool:
        return not self.leases.get(adapter_id) and adapter_id not in self.pinned

    def _could_fit(self, adapter_id: int, size_bytes: int) -> bool:
        staying = [entry for key, entry in self.here.items() if key != adapter_id and not self._may_go(key)]
        fits = sum(entry.size_bytes for entry in staying) + size_bytes <= self.MAX_BYTES
        return fits and len(staying) < self.MAX_ADAPTERS

    @rule(adapter_id=IDS, size_bytes=SIZES, version=st.integers(0, 1))
    def reserve(self, adapter_id: int, size_bytes: int, version: int) -> None:
        could_fit, path = self._could_fit(adapter_id, size_bytes), f"/{adapter_id}/{version}"
        before = self.here.get(adapter_id)
        kept = self.leases.get(adapter_id, set()) if before is not None and before.path == path else set()
        error: LoRAPluginsError | None = None
        self.allowed = {adapter_id}
        try:
            entry = self.tier.reserve(adapter_id, path, size_bytes)
        except (NoFreeSlot, OutOfMemory) as caught:
            error = caught
            assert self.here.get(adapter_id) is before, "what cannot be replaced stays"
        else:
            self.here[adapter_id] = entry
            self.leases[adapter_id] = kept
            self.staging.append(entry)
        self.allowed = set()
        assert isinstance(error, OutOfMemory) == (size_bytes > self.MAX_BYTES)
        assert isinstance(error, NoFreeSlot) == (size_bytes <= self.MAX_BYTES and not could_fit)

    @precondition(lambda self: self.staging)
    @rule(data=st.data(), size_bytes=SIZES)
    def arrived(self, data: st.DataObject, size_bytes: int) -> None:
        entry = self.staging.pop(data.draw(st.integers(0, len(self.staging) - 1)))
        before = dict(self.here)
        self.tier.arrived(entry, "model", size_bytes, 0.1)
        assert self.here == before, "the staging thread evicts nobody"

    @rule(adapter_id=IDS)
    def settle(self, adapter_id: int) -> None:
        entry = self.here.get(adapter_id)
        landed = entry.landed if entry is not None else None
        could_fit = landed is not None and self._could_fit(adapter_id, landed[1])
        self.tier.settle(adapter_id)
        assert self.here.get(adapter_id) is entry
        if entry is not None and landed is not None:
            assert entry.stage is (Stage.STAGED if could_fit else Stage.FAILED)
            assert isinstance(entry.error, OutOfMemory) == (landed[1] > self.MAX_BYTES)

    @precondition(lambda self: self.staging)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        entry = self.staging.pop(data.draw(st.integers(0, len(self.staging) - 1)))
        self.tier.failed(entry, BROKEN)

    @rule(adapter_id=IDS)
    def slot_failed(self, adapter_id: int) -> None:
        if (entry := self.here.get(adapter_id)) is not None and entry.stage is Stage.STAGED:
            self.tier.failed(entry, BROKEN)

    @rule(adapter_id=IDS, owner=OWNERS)
    def lease(self, adapter_id: int, owner: str) -> None:
        if adapter_id in self.here:
            self.tier.lease(adapter_id, owner)
            self.leases[adapter_id].add(owner)
            self.removed.discard(adapter_id)

    @rule(adapter_id=IDS, owner=OWNERS)
    def release(self, adapter_id: int, owner: str) -> None:
        entry = self.here.get(adapter_id)
        if entry is not None:
            self.leases[adapter_id].discard(owner)
            if entry.stage is Stage.FAILED or adapter_id in self.removed:
                self.allowed = {adapter_id}
        self.tier.release(adapter_id, owner)
        self.allowed = set()
        assert not (adapter_id in self.removed and not self.leases[adapter_id])

    @rule(adapter_id=IDS)
    def remove(self, adapter_id: int) -> None:
        expected = adapter_id in self.here and adapter_id not in self.removed
        leased = bool(self.leases.get(adapter_id))
        self.allowed = set() if leased else {adapter_id}
        assert self.tier.remove(adapter_id) == expected
        self.allowed = set()
        assert (adapter_id in self.here) == leased
        if leased:
            self.removed.add(adapter_id)
            self.pinned.discard(adapter_id)

    @rule(adapter_id=IDS)
    def pin(self, adapter_id: int) -> None:
        if adapter_id in self.here:
            self.tier.pin(adapter_id)
            self.pinned.add(adapter_id)

    @rule(adapter_id=IDS)
    def used(self, adapter_id: int) -> None:
        self.tier.used(adapter_id)

    @rule(adapter_id=IDS)
    def drop(self, adapter_id: int) -> None:
        was_here = adapter_id in self.here
        self.allowed = {adapter_id}
        assert self.tier.drop(adapter_id) == was_here
        self.allowed = set()

    @invariant()
    def budgets_hold(self) -> None:
        assert self.tier.used_bytes <= self.MAX_BYTES
        assert len(self.tier) <= self.MAX_ADAPTERS

    @invariant()
    def tier_and_model_agree(self) -> None:
        assert len(self.tier) == len(self.here)
        for adapter_id in range(1, 7):
            assert self.tier.get(adapter_id) is self.here.get(adapter_id)
            assert self.tier.is_leased(adapter_id) == bool(self.leases.get(adapter_id))
        staged = {key for key, entry in self.here.items() if entry.stage is Stage.STAGED}
        assert self.tier.staged() == staged - self.removed

    @invariant()
    def only_the_staged_have_a_model(self) -> None:
        for entry in self.here.values():
            assert (entry.model is not None) == (entry.stage is Stage.STAGED)
            assert (entry.error is not None) == (entry.stage is Stage.FAILED)


TestTierMachine = TierMachine.TestCase
