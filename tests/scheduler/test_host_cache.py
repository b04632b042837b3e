from __future__ import annotations

import time

import pytest

from lora_plugins.scheduler.eviction_policies import Lru, make_policy
from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.settings import HOST_POLICIES
from tests.scheduler.simulated import spec


def cache_of(max_bytes: int | None = 100, max_adapters: int = 3) -> HostCache:
    return HostCache(max_bytes, max_adapters, Lru())


def filled(cache: HostCache, *keys: int, size_bytes: int = 10, is_idle: bool = True) -> HostCache:
    for key in keys:
        cache.reserve(key, size_bytes)
        cache.loaded(key, spec(key, size_bytes), size_bytes, 0.1)
        cache.set_idle(key, is_idle=is_idle)
    return cache


def test_reserved_bytes_count_before_anything_is_loaded() -> None:
    cache = cache_of()
    cache.reserve(1, 60)
    assert cache.used_bytes == 60
    assert not cache.has_room([50])
    assert cache.has_room([50], [1])


def test_a_size_seen_once_replaces_the_estimate() -> None:
    cache = cache_of()
    cache.reserve(1, 60)
    cache.loaded(1, spec(1, 60), 90, 0.1)
    assert cache.used_bytes == cache.sizes_bytes[1] == cache.remove(1) == 90
    assert cache.used_bytes == len(cache.sizes_bytes) == 0
    assert cache.expected_bytes(spec(1, 60)) == 90
    assert cache.expected_bytes(spec(2, 60)) == 60


def test_the_number_of_adapters_is_limited_without_bytes() -> None:
    cache = cache_of(max_bytes=None, max_adapters=1)
    cache.reserve(1, 10**12)
    assert not cache.has_room([0])
    assert not cache.has_room([0, 0], [1])
    assert cache.has_room([10**12], [1])


def test_victims_are_idle_or_named_in_the_policys_order() -> None:
    cache = filled(cache_of(max_bytes=30), 1, 2, 3, is_idle=False)
    cache.used(1)
    assert cache.victims([10]) is None
    assert cache.victims([10], also=[1, 3]) == [3]
    assert cache.victims([20], also=[1]) is None
    assert cache.victims([10], gone=[3]) == []
    for key in (1, 2, 3):
        cache.set_idle(key, is_idle=True)
    assert cache.victims([10]) == [2]
    assert cache.victims([10, 10]) == [2, 3]
    assert cache.victims([20], gone=[2]) == [3]
    cache.set_idle(3, is_idle=False)
    assert cache.victims([10, 10]) == [2, 1]
    assert cache.victims([10, 10, 10]) is None
    assert cache.victims([10, 10, 10], also=[1, 3]) == [2, 3, 1]


def test_each_adapter_beyond_the_number_has_a_victim() -> None:
    cache = filled(cache_of(max_bytes=None, max_adapters=3), 1, 2, 3)
    assert cache.victims([10]) == [1]
    assert cache.victims([10, 10]) == [1, 2]
    assert cache.victims([10] * 4) is None


def test_room_beside_what_stays_counts_nothing_else() -> None:
    cache = cache_of(max_bytes=100, max_adapters=2)
    cache.reserve(1, 60)
    cache.reserve(2, 30)
    assert cache.has_room_beside([40], [1])
    assert not cache.has_room_beside([41], [1])
    assert not cache.has_room_beside([1], [1, 2])


@pytest.mark.parametrize("policy", HOST_POLICIES)
def test_thousands_of_idle_adapters_are_judged_in_one_pass(policy: str) -> None:
    """The engine's loop waits: with 3,000 idle adapters this took a second for each change of a plan."""
    cache = filled(HostCache(3_000, 4_000, make_policy(policy)), *range(3_000), size_bytes=1)
    began = time.process_time()
    for _ in range(100):
        assert cache.victims([3_001]) is None
    told_s = time.process_time() - began
    assert cache.victims([3_000]) == list(range(3_000))
    assert time.process_time() - began - told_s < 0.2, "each is chosen once"
    assert told_s / 100 < 0.0002, "nothing is counted"
