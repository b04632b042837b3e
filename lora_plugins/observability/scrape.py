"""`/metrics` with the current figures of engines and store, queried only when `/metrics` is scraped.

Runs in the event loop of the API server: the middleware `RefreshBeforeScrape` refreshes `MetricsCollector` before
`prometheus_client` collects from it. A query costs the engine loop a call between two steps. Queries are at least a
second apart. A scrape waits for the answer for two seconds at most; after two seconds the scrape shows the last
answer's figures.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from lora_plugins.log import logger
from lora_plugins.observability import engine_metrics as of_engines
from lora_plugins.observability.adapter_labels import AdapterLabels, Labelled
from lora_plugins.scheduler.messages import PlannerFigures
from lora_plugins.store.store import Store

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
# Seconds: reading the store's usage scans a directory on disk, so the interval is longer.
STORE_INTERVAL_S = 5.0

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
Asgi = Callable[[_Message, _Receive, _Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The store's content, and its budget."""

    adapters: int
    size_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, store: Store) -> Self:
        """Count the published adapters and their bytes; an adapter with an unreadable manifest is left out."""
        return cls(*store.inventory.readable(), store.max_bytes)


@dataclass(frozen=True, slots=True)
class Reports:
    """Figures of a server's engines: the model's name, and each engine's figures by its number."""

    model_name: str = ""
    engines: Mapping[int, PlannerFigures] = field(default_factory=dict)


class CachedAnswer:
    """The last answer to a query that is repeated only after `interval_s`.

    For a single event loop. A query that fails keeps the last answer. The next caller repeats a query that is answered
    with None, because the engine is not there yet.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._asked_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self.answer: Any = None
        self.answered_at: float | None = None

    async def refresh(self, ask: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
        """Query, if the interval is over, and wait for the answer for `timeout_s` at most."""
        # All scrapes share the running query: a slow engine gets a single question.
        if self._asking is None and time.monotonic() - self._asked_at >= self._interval_s:
            self._asked_at = time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._ask(ask))
        if self._asking is not None:
            # `wait`, not `wait_for`: the query goes on after the timeout, and its answer serves the next scrape.
            await asyncio.wait((self._asking,), timeout=timeout_s)

    async def _ask(self, ask: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.answer = await ask()
            self.answered_at = time.monotonic()
            if self.answer is None:
                self._asked_at = -math.inf
        except Exception as error:  # noqa: BLE001 - a scrape shows the last answer
            logger.debug("Metrics without the latest figures: %s: %s", type(error).__name__, error)
        finally:
            self._asking = None

    @property
    def age_s(self) -> float | None:
        """Seconds since the last answer; None without an answer."""
        return None if self.answered_at is None else time.monotonic() - self.answered_at


class MetricsCollector:
    """Collects the engines' figures and the store's usage at a scrape.

    Has no name: vLLM unregisters collectors named `vllm:…` whenever it makes its own.

    Args:
        query_engines: returns the figures of the planners behind an engine client, or None without our planners.
        read_store_usage: returns how full the store is, or None without a store; called in a thread.
        labelled: which adapters have their own label.
        is_taken: whether somebody else has a metric of this name. Ours is left out then: strict parsers (Go's) read
            nothing of a page with a second TYPE line for a name.
        counted: metrics of events, which are collected too; not in vLLM's registry, which refuses a name twice.
    """

    def __init__(
        self,
        query_engines: Callable[[Any], Awaitable[Reports | None]],
        read_store_usage: Callable[[], StoreUsage | None],
        labelled: Labelled,
        is_taken: Callable[[str], bool] = lambda _: False,
        counted: CollectorRegistry | None = None,
    ) -> None:
        self._query_engines = query_engines
        self._read_store_usage = read_store_usage
        self._labels = AdapterLabels(labelled)
        self._is_taken, self._counted = is_taken, counted
        self._engines = CachedAnswer(INTERVAL_S)
        self._store = CachedAnswer(STORE_INTERVAL_S)

    async def refresh(self, client: Any) -> None:
        """Query every old answer, so that the next collection is recent."""
        await asyncio.gather(
            self._engines.refresh(lambda: self._query_engines(client), TIMEOUT_S),
            self._store.refresh(lambda: asyncio.to_thread(self._read_store_usage), TIMEOUT_S),
        )

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics that nobody else has, as `prometheus_client` wants of a collector."""
        if self._counted is not None:
            yield from self._counted.collect()
        yield from (family for family in self._families() if not self._is_taken(family.name))

    def _families(self) -> Iterator[Metric]:
        reports: Reports | None = self._engines.answer
        if reports is not None:
            yield from of_engines.families(reports.model_name, reports.engines, self._labels)
            text = "Since the engines last answered"
            yield GaugeMetricFamily("lora_plugins_figures_age_seconds", text, self._engines.age_s)
        store: StoreUsage | None = self._store.answer
        if store is not None:
            yield GaugeMetricFamily("lora_plugins_store_adapters", "Adapters in the store", store.adapters)
            yield GaugeMetricFamily("lora_plugins_store_bytes", "Bytes of the adapters in the store", store.size_bytes)
            yield GaugeMetricFamily("lora_plugins_store_max_bytes", "The budget of the store", store.max_bytes)


class RefreshBeforeScrape:
    """An ASGI middleware: a scrape of `/metrics` refreshes the figures first; other requests pass unchanged.

    Args:
        answer: serves the scrape where `app` shows no figures of ours: with several API servers, vLLM sums files.
    """

    def __init__(self, app: Asgi, refresh: Callable[[Any], Awaitable[None]], answer: Asgi | None = None) -> None:
        self._app = app
        self._refresh = refresh
        self._answer = answer

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass a connection on."""
        if scope["type"] == "http" and _is_scrape(scope):
            await self._refresh(getattr(scope["app"].state, "engine_client", None))
            if self._answer is not None:
                await self._answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_scrape(scope: _Message) -> bool:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path.rstrip("/") == "/metrics" and scope["method"] in ("GET", "HEAD")
