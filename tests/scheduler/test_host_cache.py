from __future__ import annotations

from lora_plugins.scheduler.host_cache import HostCache
from lora_plugins.scheduler.policies import Lru


def cache_of(max_bytes: int | None = 100, max_adapters: int = 3) -> HostCache:
    return HostCache(max_bytes, max_adapters, Lru())


def test_reserved_bytes_count_before_anything_is_loaded() -> None:
    cache = cache_of()
    cache.reserve(1, 60)
    assert cache.used_bytes == 60
    assert not cache.fits_without(50, 1, 0, 0)
    assert cache.fits_without(50, 1, 60, 1)


def test_what_is_loaded_counts_with_its_real_size() -> None:
    cache = cache_of()
    cache.reserve(1, 60)
    cache.loaded(1, "/a", 90, 0.1)
    assert cache.used_bytes == cache.size_bytes(1) == 90
    assert cache.remove(1) == 90
    assert cache.used_bytes == len(cache) == 0


def test_a_size_seen_once_replaces_the_estimate() -> None:
    cache = cache_of()
    cache.reserve(1, 60)
    cache.loaded(1, "/a", 90, 0.1)
    cache.remove(1)
    assert cache.expected_bytes("/a", 60) == 90
    assert cache.expected_bytes("/b", 60) == 60


def test_the_number_of_adapters_is_limited_without_bytes() -> None:
    cache = cache_of(max_bytes=None, max_adapters=1)
    cache.reserve(1, 10**12)
    assert not cache.fits_without(0, 1, 0, 0)
    assert cache.fits_without(10**12, 1, 0, 1)


def test_the_victim_is_chosen_among_those_allowed() -> None:
    cache = cache_of()
    for engine_id in (1, 2, 3):
        cache.reserve(engine_id, 10)
        cache.loaded(engine_id, f"/{engine_id}", 10, 0.1)
    cache.used(1)
    assert list(cache) == [1, 2, 3]
    assert cache.victim({1, 2, 3}) == 2
    assert cache.victim({1, 3}) == 3
    assert cache.victim(set()) is None
