"""The planners' figures as metrics: a series for each engine, a bounded number of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lora_plugins.observability.adapter_labels import OTHERS, AdapterLabels
from lora_plugins.observability.engine_metrics import families
from lora_plugins.observability.scrape import StoreUsage
from lora_plugins.scheduler.messages import AdapterState, PlannerFigures
from lora_plugins.scheduler.stats import BOUNDS_S, FoundIn, Histogram, Stats
from lora_plugins.store import inventory as inventory_module
from lora_plugins.store.store import Store
from tests.store.common import DownloadSpec, adapter_files, obtain


def engine(*loaded: tuple[str, bool, bool, *tuple[int, ...]], host_max_bytes=None, **counted) -> PlannerFigures:
    """Figures of an engine with these adapters: name, whether it is in a slot, whether it is pinned, its rank."""
    return PlannerFigures(
        slots=2,
        held=0,
        host_bytes=0,
        host_max_adapters=5,
        host_max_bytes=host_max_bytes,
        loaded=tuple(AdapterState(1, name, 0, True, *more) for name, *more in loaded),
        stats=Stats(**counted),
    )


def shown(engines, max_adapters=10) -> dict[str, float]:
    return {
        ",".join((sample.name, *sample.labels.values())): sample.value
        for family in families("llama", engines, AdapterLabels(max_adapters))
        for sample in family.samples
    }


def loaded(engines, max_adapters=10) -> dict[str, float]:
    prefix = "vllm:lora_adapter_loaded,llama,"
    return {k.removeprefix(prefix): v for k, v in shown(engines, max_adapters).items() if k.startswith(prefix)}


def test_loaded_adapters_are_shown_by_level():
    rows = [["sql", True, False, 8], ["chat", False, True, 64], ["poet", False, False]]
    engines = {0: engine(*rows)}
    assert loaded(engines) == {"0,sql,gpu,false,8": 1, "0,chat,cpu,true,64": 1, "0,poet,cpu,false,": 1}
    figures = shown(engines)
    assert figures["vllm:num_gpu_loaded_lora_adapters,llama,0"] == 1
    assert figures["vllm:num_cpu_loaded_lora_adapters,llama,0"] == 3, "those in slots too, as vLLM's will"
    assert figures["vllm:max_gpu_lora_adapters,llama,0"] == 2


def test_unloaded_adapter_has_no_series():
    assert loaded({0: engine(("sql", True, False))})
    assert loaded({0: engine()}) == {}


def test_two_versions_of_a_name_count_as_one_adapter():
    rows = [["sql", True, False, 8], ["sql", False, True, 16]]
    for figures in (engine(*rows), engine(*reversed(rows))):
        assert loaded({0: figures}) == {"0,sql,gpu,true,8": 1}
        assert shown({0: figures})["vllm:num_cpu_loaded_lora_adapters,llama,0"] == 1
    assert loaded({0: engine(["sql", False, False, 8], ["sql", False, False, 16])}) == {"0,sql,cpu,false,16": 1}


def test_each_engine_has_its_own_series():
    figures = shown({1: engine(slot_evictions=1), 0: engine(slot_evictions=5)})
    evictions = {k: v for k, v in figures.items() if k.startswith("lora_plugins_slot_evictions_total")}
    assert evictions == {
        "lora_plugins_slot_evictions_total,llama,0": 5,
        "lora_plugins_slot_evictions_total,llama,1": 1,
    }


def test_budget_has_a_series_only_where_it_is_set():
    assert not [key for key in shown({0: engine()}) if "host_max_bytes" in key]
    assert shown({0: engine(host_max_bytes=7)})["lora_plugins_host_max_bytes,llama,0"] == 7


def test_refused_requests_are_counted_by_their_codes():
    figures = shown({0: engine(refused={"L001": 2, "L004": 3}), 1: engine(refused={"L001": 1})})
    refused = {k.split("_total,llama,")[1]: v for k, v in figures.items() if "refused_requests_total" in k}
    assert refused == {"0,L001": 2, "0,L004": 3, "1,L001": 1}


def test_adapters_beyond_the_limit_share_a_label():
    rows = [[f"warm-{number}", False, number == 0, 8 + number] for number in range(4)] + [["hot", True, False, 4]]
    assert loaded({0: engine(*rows)}, max_adapters=2) == {
        "0,hot,gpu,false,4": 1,
        "0,warm-0,cpu,true,8": 1,
        f"0,{OTHERS},cpu,false,": 3,
    }


def test_durations_are_a_histogram():
    seconds = Histogram()
    for duration_s in (0.00005, 0.001, 0.0011, 3.0, 1000.0):
        seconds.observe(duration_s)
    waits = {FoundIn.SLOT: Histogram(), FoundIn.HOST: seconds, FoundIn.STORE: Histogram()}
    figures = shown({0: engine(load_seconds=seconds, activate_seconds=seconds, wait_seconds=waits)})
    for name, labels in (
        ("vllm:lora_adapter_load_seconds", "llama,0"),
        ("lora_plugins_activate_seconds", "llama,0"),
        ("lora_plugins_admission_wait_seconds", "llama,0,host"),
    ):
        buckets = [figures[f"{name}_bucket,{labels},{bound}"] for bound in BOUNDS_S]
        assert buckets[:3] == [1, 2, 3]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 4
        assert figures[f"{name}_bucket,{labels},+Inf"] == figures[f"{name}_count,{labels}"] == 5
        assert figures[f"{name}_sum,{labels}"] == seconds.total_s
    assert figures["lora_plugins_admission_wait_seconds_count,llama,0,slot"] == 0


def test_any_adapter_name_can_be_written():
    class Shown:
        def collect(self):
            return families("llama", {0: engine(("\ud800\n", True, False))}, AdapterLabels(10))

    registry = CollectorRegistry()
    registry.register(Shown())
    assert b"vllm:lora_adapter_loaded{" in generate_latest(registry)


def test_usage_is_current_and_reads_each_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store", max_bytes=10_000_000)
    assert StoreUsage.of(store) == StoreUsage(0, 0, 10_000_000)
    stored = [obtain(store, DownloadSpec(adapter_files(seed=seed), version=str(seed))) for seed in range(3)]
    one = sum(map(len, adapter_files().values()))
    assert StoreUsage.of(store) == StoreUsage(3, 3 * one, 10_000_000)
    monkeypatch.setattr(inventory_module, "entry_of", lambda *_: pytest.fail("read again"))
    assert StoreUsage.of(store) == StoreUsage(3, 3 * one, 10_000_000)
    store.leases.release(stored[0].digest)
    assert store.remove(stored[0].digest)
    assert StoreUsage.of(store) == StoreUsage(2, 2 * one, 10_000_000)


def test_adapter_without_a_readable_manifest_is_skipped(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", max_bytes=1 << 20)
    stored = obtain(store, DownloadSpec(adapter_files()))
    (store.layout.adapter("f" * 64)).mkdir()
    assert StoreUsage.of(store) == StoreUsage(1, sum(map(len, adapter_files().values())), 1 << 20)
    assert stored.directory.is_dir()
