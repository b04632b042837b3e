"""The figures of the engines' planners as Prometheus metrics.

Runs in the API server at each scrape of `/metrics`: `scrape.py` queries the engines and calls `families`. In: each
engine's `PlannerFigures`, by the engine's number. Out: metric families, made at each call, so the counts of an engine
that restarts begin at 0.

The label `engine` distinguishes engines (data parallelism), as in vLLM's metrics. Bytes are the bytes of the worker
that holds most, which `LORA_PLUGINS_HOST_MAX_BYTES` bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lora_plugins.observability.adapter_labels import OTHERS, AdapterLabels
from lora_plugins.scheduler.messages import AdapterState, PlannerFigures
from lora_plugins.scheduler.stats import BOUNDS_S, Histogram

_Reports = Sequence[tuple[tuple[str, str], PlannerFigures]]
_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
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
        yield _filled(counter, ((labels, getattr(figures.stats, key)) for labels, figures in reports))
    for key, text in _GAUGES:
        gauge = GaugeMetricFamily(f"lora_plugins_{key}", text, labels=_LABELS)
        values = ((labels, getattr(figures, key)) for labels, figures in reports)
        # None: the engine has no such limit, and 0 would read as a limit.
        yield _filled(gauge, ((labels, value) for labels, value in values if value is not None))
    text = "Requests that never ran, by error code"
    refused = CounterMetricFamily("lora_plugins_refused_requests", text, labels=(*_LABELS, "code"))
    for labels, figures in reports:
        _filled(refused, (((*labels, code), count) for code, count in sorted(figures.stats.refused.items())))
    yield refused
    yield from _durations(reports)


def _filled(family: _Family, rows: Iterable[tuple[Any, ...]]) -> _Family:
    """Return the metric with a series for each row: its labels, and what `add_metric` of its kind takes besides."""
    for row in rows:
        family.add_metric(*row)
    return family


def _residency(reports: _Reports, adapters: AdapterLabels) -> Iterator[Metric]:
    """Yield which adapters each engine has in slots and in host memory, by name and in numbers."""
    rows_of = [(labels, _by_name(figures.loaded)) for labels, figures in reports]
    yield _filled(
        GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Adapters that an engine has, by where: in a slot (gpu) or in host memory only (cpu); "
            f"the value of {OTHERS} is how many more there are",
            labels=(*_LABELS, "adapter_name", "level", "pinned", "rank"),
        ),
        (((*labels, *key), count) for labels, rows in rows_of for key, count in _series(rows, adapters).items()),
    )
    in_slots = GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots", labels=_LABELS)
    yield _filled(in_slots, ((labels, sum(row.is_active for row in rows)) for labels, rows in rows_of))
    text = "Adapters in host memory, those in slots among them"
    in_host = GaugeMetricFamily("vllm:num_cpu_loaded_lora_adapters", text, labels=_LABELS)
    yield _filled(in_host, ((labels, len(rows)) for labels, rows in rows_of))
    text = "Ordinary adapters that may run in one step"
    slots = GaugeMetricFamily("vllm:max_gpu_lora_adapters", text, labels=_LABELS)
    yield _filled(slots, ((labels, figures.slots) for labels, figures in reports))


def _series(rows: Sequence[AdapterState], adapters: AdapterLabels) -> Counter[tuple[str, ...]]:
    """Return how many adapters have each name, level, pin and rank: one, but for the adapters without a label."""
    series = Counter[tuple[str, ...]]()
    for place, row in enumerate(rows):
        name = adapters.at(place, row.name)
        # A rank for each of the other adapters would be a series each; routers take an empty rank for unknown.
        rank = "" if name == OTHERS else str(row.rank or "")
        series[name, IN_SLOT if row.is_active else IN_HOST_MEMORY, "true" if row.is_pinned else "false", rank] += 1
    return series


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
    """Yield the histograms of waits, of writing slots, and of loads."""
    text = "From a request's arrival in the scheduler until vLLM ran it, by where its adapter was (slot, host, store)"
    waits = HistogramMetricFamily("lora_plugins_admission_wait_seconds", text, labels=(*_LABELS, "found"))
    for labels, figures in reports:
        _filled(waits, (((*labels, found.value), *_buckets(it)) for found, it in figures.stats.wait_seconds.items()))
    yield waits
    text = "To write a slot in the background"
    activations = HistogramMetricFamily("lora_plugins_activate_seconds", text, labels=_LABELS)
    yield _filled(activations, ((labels, *_buckets(figures.stats.activate_seconds)) for labels, figures in reports))
    text = "To read, check and pack an adapter into host memory"
    loads = HistogramMetricFamily("vllm:lora_adapter_load_seconds", text, labels=_LABELS)
    yield _filled(loads, ((labels, *_buckets(figures.stats.load_seconds)) for labels, figures in reports))


def _buckets(seconds: Histogram) -> tuple[list[tuple[str, int]], float]:
    """Return cumulative buckets, which Prometheus wants, from the planner's counts by interval; and the sum."""
    return list(zip((*map(str, BOUNDS_S), "+Inf"), accumulate(seconds.counts), strict=True)), seconds.total_s
