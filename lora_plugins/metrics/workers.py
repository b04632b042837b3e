"""What the workers count, as metrics: taken as it is at each scrape, so a worker that starts anew starts at 0.

The workers of one engine (tensor and pipeline parallelism) hold the same adapters, so the first one speaks for all;
bytes are those of the worker that holds most, which are what `LORA_PLUGINS_HOST_MAX_BYTES` bounds; an adapter is
loaded where every worker has it. Engines (data parallelism) are told apart by the label `engine`, as in vLLM's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lora_plugins.manager.counters import BOUNDS_S
from lora_plugins.metrics.labels import OTHERS, label_of

Worker = Mapping[str, Any]  # the group `counters` of `get_lora_metrics()`
_LABELS = ("model_name", "engine")

# As vllm-project/vllm#54830 names them, also where the device is a CPU: llm-d's router reads these.
IN_SLOT, IN_HOST_MEMORY = "gpu", "cpu"

_COUNTERS = (
    ("host_evictions", "Adapters that left a worker's host memory to make room"),
    ("host_evicted_bytes", "Their bytes"),
    ("load_failures", "Adapters that a worker could not bring into its host memory or a slot"),
    ("slot_flips", "Slots that were filled beside the engine loop and changed their owner in it"),
    ("slot_copies", "Slots that were filled in the engine loop, which everybody waits for"),
    ("slot_evictions", "Adapters that lost their slot to another"),
)
_LEVELS = (
    ("host_max_adapters", "Adapters that fit a worker's host memory (--max-cpu-loras)"),
    ("host_leased", "Adapters in host memory that may not go, because requests use them or did a moment ago"),
)
_LARGEST = (
    ("host_bytes", "Bytes of adapters in host memory, of the worker that holds most"),
    ("host_max_bytes", "LORA_PLUGINS_HOST_MAX_BYTES, where it is set"),
)


def families(model_name: str, engines: Mapping[int, Sequence[Worker]], most_adapters: int) -> Iterator[Metric]:
    """The metrics of all engines' workers; an engine without workers is left out."""
    told = [((model_name, str(number)), workers) for number, workers in sorted(engines.items()) if workers]
    yield from _residency(told, most_adapters)
    for key, text in _COUNTERS:
        counter = CounterMetricFamily(f"lora_plugins_{key}", text, labels=_LABELS)
        for labels, workers in told:
            counter.add_metric(labels, workers[0][key])
        yield counter
    for key, text in (*_LEVELS, *_LARGEST):
        gauge = GaugeMetricFamily(f"lora_plugins_{key}", text, labels=_LABELS)
        for labels, workers in told:
            values = [worker[key] for worker in workers if worker[key] is not None]
            if values:
                gauge.add_metric(labels, max(values))
        yield gauge
    yield _histogram("lora_plugins_activate_seconds", "In the engine loop: to give a slot to an adapter", told)
    yield _histogram("vllm:lora_adapter_load_seconds", "To read, match and pack an adapter into host memory", told)


def _residency(told: Sequence[tuple[tuple[str, str], Sequence[Worker]]], most_adapters: int) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "Adapters that an engine has, by where: in a slot (gpu) or in host memory only (cpu); "
        f"the value of {OTHERS} is how many more there are",
        labels=(*_LABELS, "adapter_name", "level", "pinned"),
    )
    in_slots = GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots", labels=_LABELS)
    in_host = GaugeMetricFamily("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory only", labels=_LABELS)
    slots = GaugeMetricFamily("vllm:max_gpu_lora_adapters", "Slots (--max-loras)", labels=_LABELS)
    for labels, workers in told:
        rows = _loaded_everywhere(workers)
        levels = [level for _, level, _ in rows]
        in_slots.add_metric(labels, levels.count(IN_SLOT))
        in_host.add_metric(labels, levels.count(IN_HOST_MEMORY))
        slots.add_metric(labels, workers[0]["slots"])
        series: dict[tuple[str, str, str], int] = {}
        for place, (name, level, pinned) in enumerate(rows):
            key = (label_of(name) if place < most_adapters else OTHERS, level, "true" if pinned else "false")
            series[key] = series.get(key, 0) + 1
        for key, value in series.items():
            loaded.add_metric((*labels, *key), value)
    yield from (loaded, in_slots, in_host, slots)


def _loaded_everywhere(workers: Sequence[Worker]) -> list[tuple[str, str, bool]]:
    """Name, level and whether it is pinned, of the adapters that every worker has; those in slots first."""
    of_each = [_by_name(worker["loaded"]) for worker in workers]
    rows = []
    for name in set.intersection(*(set(one) for one in of_each)):
        in_slot = all(one[name][0] for one in of_each)
        rows.append((name, IN_SLOT if in_slot else IN_HOST_MEMORY, all(one[name][1] for one in of_each)))
    return sorted(rows, key=lambda row: (row[1] != IN_SLOT, row[0]))


def _by_name(rows: Sequence[tuple[str, bool, bool]]) -> dict[str, tuple[bool, bool]]:
    """Whether a slot has it and whether it is pinned; during a swap there are two versions of one name."""
    known: dict[str, tuple[bool, bool]] = {}
    for name, in_slot, pinned in rows:
        before = known.get(name, (False, False))
        known[name] = (in_slot or before[0], pinned or before[1])
    return known


def _histogram(name: str, text: str, told: Sequence[tuple[tuple[str, str], Sequence[Worker]]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    key = name.removeprefix("lora_plugins_").removeprefix("vllm:lora_adapter_")
    for labels, workers in told:
        counted, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), workers[0][key]["counts"], strict=True):
            counted += count
            buckets.append((bound, counted))
        family.add_metric(labels, buckets, workers[0][key]["total_s"])
    return family
