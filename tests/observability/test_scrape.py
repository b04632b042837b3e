"""A scrape: queries the engines first, not too often, and is answered whatever becomes of the query."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, make_asgi_app

from lora_plugins.observability.scrape import CachedAnswer, MetricsCollector, RefreshBeforeScrape, Reports, StoreUsage
from tests.observability.test_engine_metrics import engine
from tests.virtual_time import run_in_virtual_time


def test_query_is_repeated_only_after_its_interval():
    asked = []

    async def ask():
        asked.append(1)
        return len(asked)

    async def run():
        latest = CachedAnswer(interval_s=0.1)
        assert latest.age_s is None
        for _ in range(5):
            await latest.refresh(ask, 1.0)
        assert latest.answer == 1
        assert latest.age_s == 0
        await asyncio.sleep(0.09)
        await latest.refresh(ask, 1.0)
        assert latest.answer == 1
        await asyncio.sleep(0.02)
        await asyncio.gather(*(latest.refresh(ask, 1.0) for _ in range(5)))
        assert latest.answer == 2

    run_in_virtual_time(run())


def test_late_answer_delays_a_scrape_by_the_timeout_only():
    async def run():
        latest, go = CachedAnswer(interval_s=0.0), asyncio.Event()

        async def ask():
            await go.wait()
            return "late"

        started = time.monotonic()
        await latest.refresh(ask, 0.05)
        await latest.refresh(ask, 0.05)  # the same question
        assert time.monotonic() - started == pytest.approx(0.1)
        assert latest.answer is None
        go.set()
        await latest.refresh(ask, 1.0)
        assert latest.answer == "late"

    run_in_virtual_time(run())


@pytest.mark.parametrize(
    ("interval_s", "answers", "known"),
    [
        (0.0, [1, RuntimeError("no engine answers"), 3], [1, 1, 3]),
        (1000.0, [None, None, "there"], [None, None, "there"]),
    ],
    ids=["failed", "none"],
)
def test_query_without_an_answer_is_repeated_at_once(interval_s, answers, known):
    left = iter(answers)

    async def ask():
        if isinstance(answer := next(left), Exception):
            raise answer
        return answer

    async def run():
        latest = CachedAnswer(interval_s)
        found = []
        for _ in range(3):
            await latest.refresh(ask, 1.0)
            found.append(latest.answer)
        assert found == known

    run_in_virtual_time(run())


def test_client_that_disconnects_does_not_cancel_the_query():
    async def run():
        latest, go = CachedAnswer(interval_s=0.0), asyncio.Event()

        async def ask():
            await go.wait()
            return "answer"

        impatient = asyncio.create_task(latest.refresh(ask, 10.0))
        await asyncio.sleep(0.01)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        go.set()
        await latest.refresh(ask, 1.0)
        assert latest.answer == "answer"

    run_in_virtual_time(run())


class Server:
    """An app with `/metrics`, before which the middleware stands."""

    def __init__(self, reports=None, store=None, *, answers_itself=False) -> None:
        self.asked_of: list[object] = []
        self.reports = reports
        self.figures = MetricsCollector(self.ask, lambda: store, 10)
        registry = CollectorRegistry()
        registry.register(self.figures)
        self.shown = make_asgi_app(registry=registry)
        self.passed: list[str] = []
        self.middleware = RefreshBeforeScrape(self.app, self.figures.refresh, self.shown if answers_itself else None)
        self.client = object()

    async def ask(self, client):
        self.asked_of.append(client)
        if isinstance(self.reports, Exception):
            raise self.reports
        return self.reports

    async def app(self, scope, receive, send):
        self.passed.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            await self.shown(scope, receive, send)

    def get(self, path="/metrics", *, kind="http", method="GET", root_path="", state=None) -> str:
        sent = []

        async def receive():
            return {"type": "http.request"}

        async def send(message):
            sent.append(message)

        state = SimpleNamespace(engine_client=self.client) if state is None else state
        scope = {
            "type": kind, "path": path, "method": method, "root_path": root_path, "headers": [],
            "query_string": b"", "app": SimpleNamespace(state=state),
        }  # fmt: skip
        if kind != "http":
            del scope["method"]
        asyncio.run(self.middleware(scope, receive, send))
        return b"".join(message.get("body", b"") for message in sent).decode()


REPORTS = Reports("llama", {0: engine(instant_activations=3)})


def test_scrape_shows_current_figures_of_engines():
    server = Server(REPORTS)
    text = server.get()
    assert server.asked_of == [server.client]
    assert 'lora_plugins_instant_activations_total{engine="0",model_name="llama"} 3.0' in text
    assert 0 <= float(re.search(r"^lora_plugins_figures_age_seconds (\S+)$", text, re.MULTILINE)[1]) < 60
    assert server.passed == ["/metrics"]
    early = Server(REPORTS)
    early.get(state=SimpleNamespace())
    assert early.asked_of == [None], "before there is an engine"


def test_scrape_shows_store_usage_and_its_budget():
    text = Server(REPORTS, StoreUsage(2, 300, 900)).get()
    assert "lora_plugins_store_adapters 2.0" in text
    assert "lora_plugins_store_bytes 300.0" in text
    assert "lora_plugins_store_max_bytes 900.0" in text


@pytest.mark.parametrize("reports", [None, RuntimeError("the engine is dead")])
def test_scrape_without_engine_answer_shows_the_rest(reports):
    text = Server(reports, StoreUsage(2, 300, 900)).get()
    assert "lora_plugins_store_adapters 2.0" in text
    assert "instant_activations" not in text


@pytest.mark.parametrize(
    "other",
    [
        *[{"path": path} for path in ("/v1/completions", "/metrics2", "/", "/v1/metrics")],
        *[{"kind": kind} for kind in ("lifespan", "websocket")],
    ],
    ids=str,
)
def test_other_requests_pass_and_query_nothing(other):
    server = Server(REPORTS)
    server.get(**other)
    assert (server.asked_of, server.passed) == ([], [other.get("path", "/metrics")])


@pytest.mark.parametrize(("path", "root_path"), [("/metrics/", ""), ("/llm/metrics", "/llm"), ("/metrics", "/llm")])
def test_scrape_is_recognised_below_any_root_path(path, root_path):
    server = Server(REPORTS)
    server.get(path, root_path=root_path)
    assert len(server.asked_of) == 1


def test_own_answer_replaces_the_one_of_the_app():
    server = Server(REPORTS, answers_itself=True)
    assert "lora_plugins_instant_activations_total" in server.get()
    assert server.passed == []
    server.get("/health")
    assert server.passed == ["/health"]
