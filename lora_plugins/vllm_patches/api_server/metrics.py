"""Our metrics on vLLM's `/metrics`, and vLLM's `vllm:lora_requests_info` kept short.

Runs in an API server: `serve_metrics` as the application is made, and the rest before each scrape. vLLM makes a series
of `vllm:lora_requests_info` for each set of adapters that ran or waited together, and removes no series: a server of
many adapters, and each scrape of the server, grows for ever.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Gauge, generate_latest

from lora_plugins.observability.adapter_labels import keep_latest
from lora_plugins.observability.event_metrics import CountEvents
from lora_plugins.observability.scrape import MetricsCollector, RefreshBeforeScrape, Reports, StoreUsage
from lora_plugins.process import Process
from lora_plugins.vllm_patches.api_server.async_llm import is_planned, planner_of

NAME = "vllm:lora_requests_info"
# Routers read the last series; some more, for who looks at a moment that has just passed.
MOST_SERIES = 32


def serve_metrics(app: Any, process: Process) -> None:
    """Count from here on, and show the counts on the application's `/metrics`.

    A second call, for another app of the process, keeps the counts.

    `unregister_vllm_metrics` removes collectors that have a name; ours has none. A metric of ours whose name vLLM has
    is left out (`vllm:lora_adapter_loaded` and its like, once vllm-project/vllm#54830 is merged).

    Touches: vllm.v1.metrics.prometheus: get_prometheus_registry() unregister_vllm_metrics()
    Why: with several API servers the registry reads the files of all. vLLM unregisters whenever it makes its own.
    Until: vLLM lets a plugin refresh its metrics before a scrape.
    """
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    shown = get_prometheus_registry()
    is_shared = shown is not REGISTRY  # several API servers count in files, and any of them shows the sums
    collector = process.collector
    if collector is None:
        counted, labelled = CollectorRegistry(), process.settings.metrics_adapters
        process.events.add(CountEvents(counted, labelled, can_forget=not is_shared))
        collector = process.collector = MetricsCollector(
            _query_engines,
            functools.partial(_read_store_usage, process),
            labelled,
            _is_of_vllm,
            None if is_shared else counted,
        )
        if not is_shared:
            REGISTRY.register(collector)
    if is_shared:
        shown.register(collector)
        app.add_middleware(RefreshBeforeScrape, refresh=collector.refresh, answer=functools.partial(_answer, shown))
        return

    async def refresh(client: Any) -> None:
        await collector.refresh(client)
        forget_old_series()

    app.add_middleware(RefreshBeforeScrape, refresh=refresh)


def _is_of_vllm(name: str) -> bool:
    """Return whether vLLM has a metric of this name; with several API servers, vLLM's metrics are in our registry too.

    Another way to ask `prometheus_client` is to collect everything once more, and llm-d scrapes every 50 ms.
    """
    return name in REGISTRY._names_to_collectors  # noqa: SLF001 - vLLM reads its other half, `_collector_to_names`


async def _answer(registry: CollectorRegistry, scope: Any, receive: Any, send: Any) -> None:
    """Answer `/metrics` as vLLM does, from `registry`: vLLM makes a new registry at each scrape."""
    from starlette.responses import Response

    text = await asyncio.to_thread(generate_latest, registry)
    await Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})(scope, receive, send)


async def _query_engines(client: Any) -> Reports | None:
    if not is_planned(client):
        return None
    return Reports(str(client.vllm_config.model_config.served_model_name), await planner_of(client).figures())


def _read_store_usage(process: Process) -> StoreUsage | None:
    return StoreUsage.of(process.resolver.store) if process.has_opened_resolver else None


def forget_old_series() -> None:
    """Remove series of sets that ran long ago; call before a scrape, in the event loop that sets them.

    Nothing happens where several API servers count in files, from which no series can be removed.

    vLLM's `record` sets each series to the time.

    Touches:
        vllm.v1.metrics.loggers:
            PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    Why: vLLM makes a series for each set of adapters and removes none: 2,000 after 10 minutes of the soak, 420 kB in
        each scrape, which routers do every 50 ms.
    Until: vLLM bounds the series, or has a series for each adapter.
    """
    gauge = REGISTRY._names_to_collectors.get(NAME)  # noqa: SLF001 - as in `_is_of_vllm`
    if type(gauge) is Gauge:
        keep_latest(gauge, MOST_SERIES)
