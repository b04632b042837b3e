"""The metrics hook: counts events of the API server; `docs/reference/metrics.md` has the table of all metrics.

Our own metrics begin with `lora_plugins_`. Names with `vllm:` are names that vLLM itself is about to have
(vllm-project/vllm#54830), and that routers read; `engine_metrics.py` has such names.
"""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lora_plugins import events
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.observability.adapter_labels import AdapterLabels, Labelled

NO_SOURCE = "none"  # the label for a name that no source has

# Seconds: a question to a file system takes tenths of a millisecond, a fetch of gigabytes minutes.
_LOCATE_BUCKETS_S = (0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Few: each adapter has a series of each.
_FIRST_TOKEN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FETCH_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class CountEvents:
    """Turns events into metrics of `registry`.

    Called in the event loop, and for the store's evictions from a thread; `prometheus_client` locks.

    Args:
        labelled: which adapters have their own label.
        can_forget: whether a label's series can be removed: not where several processes share series in files.
    """

    def __init__(self, registry: CollectorRegistry, labelled: Labelled, *, can_forget: bool = True) -> None:
        # Only labels with adapters' names need a bound: every other label has few values.
        self._labels = AdapterLabels(labelled)
        self._can_forget = can_forget

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lora_plugins_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"lora_plugins_{name}_seconds", text, labels, registry=registry, buckets=buckets)

        self._resolves = counter(
            "resolves", "Names that were asked for, by source and result: served, refused, failed, busy, absent",
            "source", "result",
        )  # fmt: skip
        self._polls = counter(
            "polls", "Names that the server asked for by itself: for new versions, or of a declared set",
            "source", "result",
        )  # fmt: skip
        self._absences = counter(
            "absences_remembered", "Lookups saved, because the source answered recently that it has no such adapter",
            "source",
        )  # fmt: skip
        self._errors = counter(
            "errors",
            "Adapters that could not be served, by where (resolve, load, request, update, declared) and error code; "
            "requests over a key's limit (key)",
            "stage", "code",
        )  # fmt: skip
        self._locate_s = histogram("locate", "Asking sources where an adapter is", _LOCATE_BUCKETS_S, "source")
        self._fetch_s = histogram("fetch", "Fetching, verifying and publishing a version", _FETCH_BUCKETS_S, "source")
        self._fetches = Gauge(
            "lora_plugins_fetches", "Fetches that go on", ("source",), registry=registry, multiprocess_mode="livesum"
        )
        self._breakers = Gauge(
            "lora_plugins_breakers_open", "Sources that do not answer, so that names are refused at once",
            ("source",), registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self._fetched_bytes = counter("fetched_bytes", "Bytes of adapters fetched", "source")
        self._store_hits = counter("store_hits", "Versions that the store had when they were resolved")
        self._store_misses = counter("store_misses", "Versions that had to be fetched")
        self._store_evictions = counter("store_evictions", "Adapters removed from the store to make room")
        self._store_evicted_bytes = counter("store_evicted_bytes", "Their bytes")
        self._store_damaged = counter("store_damaged", "Adapters in the store that were found damaged")
        self._requests = counter("requests", "Requests that the engine has begun to answer", "adapter_name")
        self._prompt_tokens = counter(
            "prompt_tokens", "Tokens of the prompts of requests that have ended", "adapter_name"
        )
        self._generated_tokens = counter(
            "generation_tokens", "Tokens generated for requests that have ended, aborted requests among them",
            "adapter_name",
        )  # fmt: skip
        self._first_token_s = histogram(
            "time_to_first_token", "From a request's arrival until its first token", _FIRST_TOKEN_BUCKETS_S,
            "adapter_name",
        )  # fmt: skip
        self._of_adapters = (self._requests, self._prompt_tokens, self._generated_tokens, self._first_token_s)
        self._swaps = counter("swaps", "Names that were pointed to another version")
        self._swap_s = histogram("swap_load", "Loading a version beside the one that it replaces", _FETCH_BUCKETS_S)
        self._unloads = counter("unloads", "Adapters that were unloaded")
        self._drain_s = histogram("drain", "From an unload until its last request had ended", _FETCH_BUCKETS_S)
        self._declared = Gauge(
            "lora_plugins_declared_adapters",
            "Adapters of LORA_PLUGINS_ADAPTERS_FILE: served as declared, failed, or not yet tried",
            ("state",), registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self._declared_errors = counter("declared_file_errors", "Contents of that file that could not be followed")
        self._aborted = counter("drain_aborted_requests", "Requests that were ended by an unload")

    def __call__(self, event: events.Event) -> None:  # noqa: C901, PLR0912, PLR0915 - a case for each event
        match event:
            case events.AdapterResolved():
                self._count_resolve(event.source, "served")
                self._locate_s.labels(event.source).observe(event.locate_s)
                (self._store_misses if event.fetched else self._store_hits).inc()
            case events.AdapterConfirmed():
                self._count_resolve(event.source, "served")
            case events.FetchStarted():
                self._fetches.labels(event.source).inc()
            case events.FetchEnded():
                self._fetches.labels(event.source).dec()
            case events.AdapterFetched():
                self._fetch_s.labels(event.source).observe(event.fetch_s)
                self._fetched_bytes.labels(event.source).inc(event.size_bytes)
            case events.AdapterRejected():
                self._count_resolve(event.source, "refused")
                self._count_error("resolve", event.error)
            case events.SourceFailed():
                self._count_resolve(event.source, "failed")
                self._count_error("resolve", event.error)
            case events.AdapterDenied():
                self._count_resolve(event.source, "denied")
                self._count_error("resolve", event.error)
            case events.BreakerOpened():
                self._breakers.labels(event.source).inc()
            case events.BreakerClosed():
                self._breakers.labels(event.source).dec()
            case events.LookUpRefused():
                self._count_resolve(event.source, "busy")
                self._count_error("resolve", event.error)
            case events.AdapterUnknown():
                self._count_resolve(NO_SOURCE, "absent")
            case events.AbsenceRemembered():
                self._absences.labels(event.source).inc()
            case events.StoreEvicted():
                self._store_evictions.inc()
                self._store_evicted_bytes.inc(event.size_bytes)
            case events.StoreDamaged():
                self._store_damaged.inc()
            case events.RequestServed():
                self._requests.labels(self._labels.of(event.name)).inc()
            case events.RequestEnded():
                label = self._labels.of(event.name)
                self._prompt_tokens.labels(label).inc(event.prompt_tokens)
                self._generated_tokens.labels(label).inc(event.generated_tokens)
                if event.first_token_s is not None:
                    self._first_token_s.labels(label).observe(event.first_token_s)
            case events.NotServed():
                self._count_error(event.stage, event.error)
            case events.KeyRefused():
                self._count_error("key", event.error)
            case events.AdapterSwapped():
                self._swaps.inc()
                self._swap_s.observe(event.load_s)
            case events.AdapterUnloaded():
                self._unloads.inc()
                self._drain_s.observe(event.drain_s)
                self._aborted.inc(event.aborted)
                if self._can_forget and (freed := self._labels.forget(event.name)) is not None:
                    for metric in self._of_adapters:
                        with suppress(KeyError):  # of a series that never began, in older releases
                            metric.remove(freed)
            case events.DeclaredSetReconciled():
                self._declared.labels("served").set(event.served)
                self._declared.labels("failed").set(event.failed)
                self._declared.labels("waiting").set(event.declared - event.served - event.failed)
            case events.DeclaredFileInvalid():
                self._declared_errors.inc()
            case events.AdapterLoaded() | events.FetchGoesOn():
                pass  # counted by the engines; logged

    def _count_resolve(self, source: str, result: str) -> None:
        (self._polls if events.is_polling() else self._resolves).labels(source, result).inc()

    def _count_error(self, stage: str, error: LoRAPluginsError) -> None:
        self._errors.labels(stage, error.code).inc()
