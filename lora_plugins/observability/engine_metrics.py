"""Counts of the engines' planners as metrics, copied at each scrape, so an engine that restarts begins at 0.

The label `engine` distinguishes engines (data parallelism), as in vLLM's metrics. Bytes are the bytes of the worker
that holds most, which `LORA_PLUGINS_HOST_MAX_BYTES` bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lora_plugins.observability.adapter_labels import OTHERS, AdapterLabels
from lora_plugins.scheduler.messages import AdapterState, PlannerFigures
from lora_plugins.scheduler.stats import BOUNDS_S, Histogram

_Reports = Sequence[tuple[tuple[str, str], PlannerFigures]]
_LABELS = ("model_name", "engine")

# Names as in vllm-project/vllm#54830, also where the device is a CPU: llm-d's router reads the names and the label
# `rank` (llm-d/llm-d-router#2792).
IN_SLOT, IN_HOST_MEMORY = "gpu", "cpu"

_COUNTERS = (
    ("host_evictions", "Adapters that left the workers' host memory to make room"),
    ("host_evicted_bytes", "Bytes of the adapters that left host memory for others"),
    ("load_failures", "Adapters that a worker could not bring into its host memory or a slot"),
    ("slot_evictions", "Adapters that lost their slot to another"),
    ("instant_activations", "Slots that were given to an adapter with no copy, or one that is short beside a step"),
    ("background_activations", "Slots that were written in a background thread"),
)
_GAUGES = (
    ("held", "Requests that wait for their adapter to be loaded, or for a slot"),
    ("host_max_adapters", "Adapters that fit the host cache (--max-cpu-loras)"),
    ("host_bytes", "Bytes of adapters in host memory, of the worker that holds most"),
    ("host_max_bytes", "LORA_PLUGINS_HOST_MAX_BYTES, where it is set"),
    ("is_paused", "1 while vLLM's /pause holds all requests of the engine"),
)


def families(model_name: str, engines: Mapping[int, PlannerFigures], adapters: AdapterLabels) -> Iterator[Metric]:
    """Yield the metrics of all engines."""
    reports = [((model_name, str(number)), figures) for number, figures in sorted(engines.items())]
    yield from _residency(reports, adapters)
    for key, text in _COUNTERS:
        counter = CounterMetricFamily(f"lora_plugins_{key}", text, labels=_LABELS)
        for labels, figures in reports:
            counter.add_metric(labels, getattr(figures.stats, key))
        yield counter
    for key, text in _GAUGES:
        gauge = GaugeMetricFamily(f"lora_plugins_{key}", text, labels=_LABELS)
        for labels, figures in reports:
            # None: the engine has no such limit, and 0 would read as a limit.
            if (value := getattr(figures, key)) is not None:
                gauge.add_metric(labels, value)
        yield gauge
    refused = CounterMetricFamily(
        "lora_plugins_refused_requests", "Requests that never ran, by error code", labels=(*_LABELS, "code")
    )
    for labels, figures in reports:
        for code, count in sorted(figures.stats.refused.items()):
            refused.add_metric((*labels, code), count)
    yield refused
    yield from _durations(reports)


def _residency(reports: _Reports, adapters: AdapterLabels) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "Adapters that an engine has, by where: in a slot (gpu) or in host memory only (cpu); "
        f"the value of {OTHERS} is how many more there are",
        labels=(*_LABELS, "adapter_name", "level", "pinned", "rank"),
    )
    in_slots = GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots", labels=_LABELS)
    in_host = GaugeMetricFamily(
        "vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory, those in slots among them", labels=_LABELS
    )
    slots = GaugeMetricFamily(
        "vllm:max_gpu_lora_adapters", "Ordinary adapters that may run in one step", labels=_LABELS
    )
    for labels, figures in reports:
        rows = _by_name(figures.loaded)
        in_slots.add_metric(labels, sum(row.is_active for row in rows))
        in_host.add_metric(labels, len(rows))
        slots.add_metric(labels, figures.slots)
        series: dict[tuple[str, str, str, str], int] = {}
        for place, row in enumerate(rows):
            # A rank for each of the other adapters would be a series each; routers take an empty rank for unknown.
            name = adapters.at(place, row.name)
            rank = "" if name == OTHERS else str(row.rank or "")
            key = (name, IN_SLOT if row.is_active else IN_HOST_MEMORY, "true" if row.is_pinned else "false", rank)
            series[key] = series.get(key, 0) + 1
        for key, value in series.items():
            loaded.add_metric((*labels, *key), value)
    yield from (loaded, in_slots, in_host, slots)


def _by_name(rows: Sequence[AdapterState]) -> list[AdapterState]:
    """Return a row for each name, names in slots first; during a swap a name has two versions.

    The rank is the rank of the version in a slot, or else of the later version.
    """
    known: dict[str, AdapterState] = {}
    for row in rows:
        other = known.get(row.name, row)
        latest = row if row.is_active or not other.is_active else other
        known[row.name] = replace(latest, is_pinned=row.is_pinned or other.is_pinned)
    return sorted(known.values(), key=lambda row: (not row.is_active, row.name))


def _durations(reports: _Reports) -> Iterator[Metric]:
    waits = HistogramMetricFamily(
        "lora_plugins_admission_wait_seconds",
        "From a request's arrival in the scheduler until vLLM ran it, by where its adapter was (slot, host, store)",
        labels=(*_LABELS, "found"),
    )
    activations = HistogramMetricFamily(
        "lora_plugins_activate_seconds", "To write a slot in the background", labels=_LABELS
    )
    loads = HistogramMetricFamily(
        "vllm:lora_adapter_load_seconds", "To read, check and pack an adapter into host memory", labels=_LABELS
    )
    for labels, figures in reports:
        for found, seconds in figures.stats.wait_seconds.items():
            _add(waits, (*labels, found.value), seconds)
        _add(activations, labels, figures.stats.activate_seconds)
        _add(loads, labels, figures.stats.load_seconds)
    yield from (waits, activations, loads)


# Prometheus's buckets are cumulative; the planner's counts are for each interval.
def _add(family: HistogramMetricFamily, labels: Sequence[str], seconds: Histogram) -> None:
    counted, buckets = 0, []
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), seconds.counts, strict=True):
        counted += count
        buckets.append((bound, counted))
    family.add_metric(labels, buckets, seconds.total_s)
