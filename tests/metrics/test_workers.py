"""The workers' figures as metrics: engines apart, ranks not twice, residency as it is now and bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from lora_plugins.manager.counters import BOUNDS_S, Seconds
from lora_plugins.metrics.labels import OTHERS
from lora_plugins.metrics.workers import families

NONE = Seconds().plain()


def worker(**changes) -> dict:
    return {
        "loaded": [],
        "slots": 2,
        "host_max_adapters": 5,
        "host_max_bytes": None,
        "host_bytes": 0,
        "host_leased": 0,
        "host_evictions": 0,
        "host_evicted_bytes": 0,
        "load_failures": 0,
        "slot_flips": 0,
        "slot_copies": 0,
        "slot_evictions": 0,
        "load_seconds": NONE,
        "activate_seconds": NONE,
        **changes,
    }


def shown(engines, most_adapters=10) -> dict[str, float]:
    return {
        ",".join((sample.name, *sample.labels.values())): sample.value
        for family in families("llama", engines, most_adapters)
        for sample in family.samples
    }


def loaded(engines, most_adapters=10) -> dict[str, float]:
    prefix = "vllm:lora_adapter_loaded,llama,"
    return {k.removeprefix(prefix): v for k, v in shown(engines, most_adapters).items() if k.startswith(prefix)}


def test_what_is_loaded_and_where():
    rows = [["sql", True, False], ["chat", False, True], ["poet", False, False]]
    engines = {0: [worker(loaded=rows)]}
    assert loaded(engines) == {"0,sql,gpu,false": 1, "0,chat,cpu,true": 1, "0,poet,cpu,false": 1}
    figures = shown(engines)
    assert figures["vllm:num_gpu_loaded_lora_adapters,llama,0"] == 1
    assert figures["vllm:num_cpu_loaded_lora_adapters,llama,0"] == 2
    assert figures["vllm:max_gpu_lora_adapters,llama,0"] == 2


def test_what_is_gone_has_no_series():
    assert loaded({0: [worker(loaded=[["sql", True, False]])]})
    assert loaded({0: [worker()]}) == {}


def test_an_adapter_is_loaded_where_every_rank_has_it_and_counts_once():
    ranks = [
        worker(loaded=[["sql", True, False], ["chat", True, False], ["poet", True, False]]),
        worker(loaded=[["sql", True, False], ["chat", False, False]]),
    ]
    assert loaded({0: ranks}) == {"0,sql,gpu,false": 1, "0,chat,cpu,false": 1}


def test_two_versions_of_a_name_are_one_adapter():
    for rows in ([["sql", True, False], ["sql", False, True]], [["sql", False, True], ["sql", True, False]]):
        assert loaded({0: [worker(loaded=rows)]}) == {"0,sql,gpu,true": 1}


def test_ranks_are_not_added_up_and_the_fullest_counts():
    ranks = [
        worker(host_evictions=3, host_evicted_bytes=30, host_bytes=10, host_max_bytes=50, slot_flips=7, host_leased=1),
        worker(host_evictions=4, host_evicted_bytes=40, host_bytes=12, host_max_bytes=50, slot_flips=8, host_leased=2),
    ]
    figures = shown({0: ranks})
    assert figures["lora_plugins_host_evictions_total,llama,0"] == 3
    assert figures["lora_plugins_host_evicted_bytes_total,llama,0"] == 30
    assert figures["lora_plugins_slot_flips_total,llama,0"] == 7
    assert figures["lora_plugins_host_bytes,llama,0"] == 12
    assert figures["lora_plugins_host_max_bytes,llama,0"] == 50
    assert figures["lora_plugins_host_leased,llama,0"] == 2


def test_engines_stand_side_by_side():
    figures = shown({1: [worker(slot_copies=1)], 0: [worker(slot_copies=5)], 2: []})
    copies = {k: v for k, v in figures.items() if k.startswith("lora_plugins_slot_copies_total")}
    assert copies == {"lora_plugins_slot_copies_total,llama,0": 5, "lora_plugins_slot_copies_total,llama,1": 1}


def test_no_budget_no_series():
    assert not [key for key in shown({0: [worker()]}) if "host_max_bytes" in key]


def test_beyond_the_bound_adapters_are_counted_together_those_in_slots_last():
    rows = [[f"warm-{number}", False, number == 0] for number in range(4)] + [["hot", True, False]]
    assert loaded({0: [worker(loaded=rows)]}, most_adapters=2) == {
        "0,hot,gpu,false": 1,
        "0,warm-0,cpu,true": 1,
        f"0,{OTHERS},cpu,false": 3,
    }


def test_durations_are_a_histogram():
    seconds = Seconds()
    for duration_s in (0.00005, 0.001, 0.0011, 3.0, 1000.0):
        seconds.observe(duration_s)
    figures = shown({0: [worker(load_seconds=seconds.plain(), activate_seconds=seconds.plain())]})
    for name in ("vllm:lora_adapter_load_seconds", "lora_plugins_activate_seconds"):
        buckets = [figures[f"{name}_bucket,llama,0,{bound}"] for bound in BOUNDS_S]
        assert buckets[:3] == [1, 2, 3]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 4
        assert figures[f"{name}_bucket,llama,0,+Inf"] == figures[f"{name}_count,llama,0"] == 5
        assert figures[f"{name}_sum,llama,0"] == seconds.total_s


def test_all_of_it_can_be_written():
    class Shown:
        def collect(self):
            return families("llama", {0: [worker(loaded=[["\ud800\n", True, False]])]}, 10)

    registry = CollectorRegistry()
    registry.register(Shown())
    assert b"vllm:lora_adapter_loaded{" in generate_latest(registry)
