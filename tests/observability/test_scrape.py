"""A scrape: asks first, not too often, and is answered whatever becomes of the question."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, make_asgi_app

from lora_plugins.observability import scrape
from lora_plugins.observability.scrape import Figures, Latest, RefreshBeforeScrape, Reports
from lora_plugins.observability.store_metrics import InStore
from tests.observability.test_engine_metrics import engine
from tests.virtual_time import run_in_virtual_time


def test_a_question_is_not_asked_again_too_soon_and_then_anew():
    asked = []

    async def ask():
        asked.append(1)
        return len(asked)

    async def run():
        latest = Latest(interval_s=0.1)
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


def test_what_is_not_there_yet_is_asked_for_again_at_once():
    answers = iter([None, None, "there"])

    async def ask():
        return next(answers)

    async def run():
        latest = Latest(interval_s=1000.0)
        for _ in range(5):
            await latest.refresh(ask, 1.0)
        assert latest.answer == "there"

    run_in_virtual_time(run())


def test_nobody_waits_longer_than_he_would_for_an_answer_that_comes_later():
    async def run():
        latest, go = Latest(interval_s=0.0), asyncio.Event()

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


def test_a_question_that_fails_leaves_the_last_answer_and_is_asked_again():
    answers = iter([1, RuntimeError("no engine answers"), 3])

    async def ask():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run():
        latest = Latest(interval_s=0.0)
        known = []
        for _ in range(3):
            await latest.refresh(ask, 1.0)
            known.append(latest.answer)
        assert known == [1, 1, 3]

    run_in_virtual_time(run())


def test_a_client_that_hangs_up_does_not_end_the_question():
    async def run():
        latest, go = Latest(interval_s=0.0), asyncio.Event()

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
        self.figures = Figures(self.ask, lambda: store, 10)
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


def test_a_scrape_shows_what_the_engines_say_now():
    server = Server(REPORTS)
    text = server.get()
    assert server.asked_of == [server.client]
    assert 'lora_plugins_instant_activations_total{engine="0",model_name="llama"} 3.0' in text
    assert "lora_plugins_figures_age_seconds 0.0" in text
    assert server.passed == ["/metrics"]


def test_the_store_is_looked_at_and_its_budget_shown_where_it_has_one():
    text = Server(REPORTS, InStore(2, 300, None)).get()
    assert "lora_plugins_store_adapters 2.0" in text
    assert "lora_plugins_store_bytes 300.0" in text
    assert "lora_plugins_store_max_bytes" not in text
    assert "lora_plugins_store_max_bytes 900.0" in Server(REPORTS, InStore(2, 300, 900)).get()


@pytest.mark.parametrize("reports", [None, RuntimeError("the engine is dead")])
def test_without_an_answer_the_rest_is_shown(reports):
    text = Server(reports, InStore(2, 300, None)).get()
    assert "lora_plugins_store_adapters 2.0" in text
    assert "instant_activations" not in text


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics2", "/", "/v1/metrics"])
def test_other_requests_ask_nothing(path):
    server = Server(REPORTS)
    server.get(path)
    assert (server.asked_of, server.passed) == ([], [path])


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_connections_pass(kind):
    server = Server(REPORTS)
    server.get(kind=kind)
    assert (server.asked_of, server.passed) == ([], ["/metrics"])


@pytest.mark.parametrize(("path", "root_path"), [("/metrics/", ""), ("/llm/metrics", "/llm"), ("/metrics", "/llm")])
def test_a_scrape_is_known_by_its_path(path, root_path):
    server = Server(REPORTS)
    server.get(path, root_path=root_path)
    assert len(server.asked_of) == 1


def test_a_server_that_is_not_there_yet_is_asked_for_nothing():
    server = Server(None)
    server.get(state=SimpleNamespace())
    assert server.asked_of == [None]


def test_where_the_app_does_not_know_of_us_the_answer_is_ours():
    server = Server(REPORTS, answers_itself=True)
    assert "lora_plugins_instant_activations_total" in server.get()
    assert server.passed == []
    server.get("/health")
    assert server.passed == ["/health"]


def test_two_scrapes_in_a_moment_are_one_question(monkeypatch):
    monkeypatch.setattr(scrape, "INTERVAL_S", 1000.0)
    server = Server(REPORTS)
    for _ in range(3):
        assert "instant_activations" in server.get()
    assert len(server.asked_of) == 1
