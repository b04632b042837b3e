"""The metrics hook: counts events of the API server; `docs/reference/metrics.md` has the table of all metrics.

Runs in the API server, in the code that emits an event. In: events of `events.py`. Out: counters, histograms and gauges
of `prometheus_client`: the tables below say which metrics exist, and `_COUNTS` which event changes which metric.

Our own metrics begin with `lora_plugins_`. Names with `vllm:` are names that vLLM itself is about to have
(vllm-project/vllm#54830), and that routers read; `engine_metrics.py` has such names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lora_plugins import events
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.observability.adapter_labels import AdapterLabels, Labelled

NO_SOURCE = "none"  # the label for a name that no source has

# Seconds: a question to a file system takes tenths of a millisecond, a fetch of gigabytes minutes.
_LOCATE_BUCKETS_S = (0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Few: each adapter has a series of each.
_TOKEN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FETCH_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# By name, without `lora_plugins_`, and labels.
_COUNTERS: Mapping[tuple[str, ...], str] = {
    ("resolves", "source", "result"): "Names that were asked for, by source and result: served, refused, failed, busy, "
    "absent",
    ("polls", "source", "result"): "Names that the server asked for by itself: for new versions, or of a declared set",
    ("absences_remembered", "source"): "Lookups saved, as the source said lately that it has no such adapter",
    ("errors", "stage", "code"): "Adapters that could not be served, by where (resolve, load, request, update, "
    "declared) and error code; requests over a key's limit (key)",
    ("fetched_bytes", "source"): "Bytes of adapters fetched",
    ("store_hits",): "Versions that the store had when they were resolved",
    ("store_misses",): "Versions that had to be fetched",
    ("store_evictions",): "Adapters removed from the store to make room",
    ("store_evicted_bytes",): "Bytes of the adapters that left the store for others",
    ("store_damaged",): "Adapters in the store that were found damaged",
    ("requests", "adapter_name"): "Requests that the engine has begun to answer",
    ("prompt_tokens", "adapter_name"): "Tokens of the prompts of requests that have ended",
    ("generation_tokens", "adapter_name"): "Tokens generated for requests that have ended, aborted requests among them",
    ("swaps",): "Names that were pointed to another version",
    ("unloads",): "Adapters that were unloaded",
    ("declared_file_errors",): "Contents of LORA_PLUGINS_ADAPTERS_FILE that could not be followed",
    ("drain_aborted_requests",): "Requests that were ended by an unload",
}
_HISTOGRAMS: Mapping[tuple[str, ...], tuple[str, Sequence[float]]] = {
    ("locate_seconds", "source"): ("Asking sources where an adapter is", _LOCATE_BUCKETS_S),
    ("fetch_seconds", "source"): ("Fetching, verifying and publishing a version", _FETCH_BUCKETS_S),
    ("time_to_first_token_seconds", "adapter_name"): ("From a request's arrival to its first token", _TOKEN_BUCKETS_S),
    ("swap_load_seconds",): ("Loading a version beside the one that it replaces", _FETCH_BUCKETS_S),
    ("drain_seconds",): ("From an unload until its last request had ended", _FETCH_BUCKETS_S),
}
_GAUGES: Mapping[tuple[str, ...], tuple[str, Literal["livesum", "mostrecent"]]] = {
    ("fetches", "source"): ("Fetches that go on", "livesum"),
    ("breakers_open", "source"): ("Sources that do not answer, so that names are refused at once", "livesum"),
    ("declared_adapters", "state"): (
        "Adapters of LORA_PLUGINS_ADAPTERS_FILE: served as declared, failed, or not yet tried",
        "mostrecent",
    ),
}

_Count = tuple[Any, ...]  # a metric's name, by how much it changes, and its labels; nothing changes by None
_OF_ADAPTERS = [name for name, *labels in (*_COUNTERS, *_HISTOGRAMS) if labels == ["adapter_name"]]
_OBSERVED, _SET = {name for name, *_ in _HISTOGRAMS}, ("declared_adapters",)


def _asked(source: str, result: str, error: LoRAPluginsError | None = None) -> list[_Count]:
    """Return the counts of a question to the sources, and of its error."""
    asked: _Count = ("polls" if events.is_polling() else "resolves", 1, source, result)
    return [asked] if error is None else [asked, ("errors", 1, "resolve", error.code)]


# The engines count the loads of adapters; a fetch that goes on is logged.
_COUNTS: Mapping[type[events.Event], Callable[[Any], Sequence[_Count]]] = {
    events.AdapterResolved: lambda it: [
        *_asked(it.source, "served"),
        ("locate_seconds", it.locate_s, it.source),
        ("store_misses" if it.fetched else "store_hits", 1),
    ],
    events.AdapterConfirmed: lambda it: _asked(it.source, "served"),
    events.FetchStarted: lambda it: [("fetches", 1, it.source)],
    events.FetchEnded: lambda it: [("fetches", -1, it.source)],
    events.AdapterFetched: lambda it: [
        ("fetch_seconds", it.fetch_s, it.source),
        ("fetched_bytes", it.size_bytes, it.source),
    ],
    events.AdapterRejected: lambda it: _asked(it.source, "refused", it.error),
    events.SourceFailed: lambda it: _asked(it.source, "failed", it.error),
    events.AdapterDenied: lambda it: _asked(it.source, "denied", it.error),
    events.BreakerOpened: lambda it: [("breakers_open", 1, it.source)],
    events.BreakerClosed: lambda it: [("breakers_open", -1, it.source)],
    events.LookUpRefused: lambda it: _asked(it.source, "busy", it.error),
    events.AdapterUnknown: lambda _: _asked(NO_SOURCE, "absent"),
    events.AbsenceRemembered: lambda it: [("absences_remembered", 1, it.source)],
    events.StoreEvicted: lambda it: [("store_evictions", 1), ("store_evicted_bytes", it.size_bytes)],
    events.StoreDamaged: lambda _: [("store_damaged", 1)],
    events.RequestServed: lambda it: [("requests", 1, it.name)],
    events.RequestEnded: lambda it: [
        ("prompt_tokens", it.prompt_tokens, it.name),
        ("generation_tokens", it.generated_tokens, it.name),
        ("time_to_first_token_seconds", it.first_token_s, it.name),
    ],
    events.NotServed: lambda it: [("errors", 1, it.stage, it.error.code)],
    events.KeyRefused: lambda it: [("errors", 1, "key", it.error.code)],
    events.AdapterSwapped: lambda it: [("swaps", 1), ("swap_load_seconds", it.load_s)],
    events.AdapterUnloaded: lambda it: [
        ("unloads", 1),
        ("drain_seconds", it.drain_s),
        ("drain_aborted_requests", it.aborted),
    ],
    events.DeclaredSetReconciled: lambda it: [
        ("declared_adapters", it.served, "served"),
        ("declared_adapters", it.failed, "failed"),
        ("declared_adapters", it.declared - it.served - it.failed, "waiting"),
    ],
    events.DeclaredFileInvalid: lambda _: [("declared_file_errors", 1)],
}


class CountEvents:
    """Turns events into metrics of `registry`.

    Called in the event loop, and for the store's evictions from a thread; `prometheus_client` locks.

    Args:
        labelled: which adapters have their own label.
        can_forget: whether a label's series can be removed: not where several processes share series in files.

    Attributes:
        metrics: by name, without `lora_plugins_`.
    """

    def __init__(self, registry: CollectorRegistry, labelled: Labelled, *, can_forget: bool = True) -> None:
        self._labels = AdapterLabels(labelled)
        self._can_forget = can_forget
        self.metrics: dict[str, Any] = {
            name: Counter(f"lora_plugins_{name}", text, labels, registry=registry)
            for (name, *labels), text in _COUNTERS.items()
        }
        for (name, *labels), (text, buckets) in _HISTOGRAMS.items():
            self.metrics[name] = Histogram(f"lora_plugins_{name}", text, labels, registry=registry, buckets=buckets)
        for (name, *labels), (text, mode) in _GAUGES.items():
            self.metrics[name] = Gauge(f"lora_plugins_{name}", text, labels, registry=registry, multiprocess_mode=mode)

    def __call__(self, event: events.Event) -> None:
        counts = _COUNTS.get(type(event), lambda _: ())
        for name, value, *labels in counts(event):
            if value is None:
                continue
            metric = self.metrics[name]
            # Only labels with adapters' names need a bound: every other label has few values.
            bounded = [self._labels.of(*labels)] if name in _OF_ADAPTERS else labels
            series = metric.labels(*bounded) if labels else metric
            (series.observe if name in _OBSERVED else series.set if name in _SET else series.inc)(value)
        if isinstance(event, events.AdapterUnloaded) and self._can_forget:
            freed = self._labels.forget(event.name)
            for name in () if freed is None else _OF_ADAPTERS:
                with suppress(KeyError):  # older releases of prometheus_client raise where a series never began
                    self.metrics[name].remove(freed)
