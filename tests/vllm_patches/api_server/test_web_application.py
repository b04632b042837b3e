"""Status, text and headers of our errors on responses of vLLM's own exception handlers."""

from __future__ import annotations

from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.entrypoints.openai.completion import serving
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    NoFreeSlot,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.lifecycle.response import AnswerForAdapters
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import error_responses
from lora_plugins.vllm_patches.api_server import web_application as app_module
from lora_plugins.vllm_patches.api_server.metrics import MOST_SERIES, NAME, forget_old_series
from tests.virtual_time import runs
from tests.vllm_patches.engine_bed import vllm_config


@pytest.fixture
def answered(monkeypatch):
    """A function from one of our errors to the response of an application with vLLM's own exception handlers."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling import register

    monkeypatch.setattr(register, "http_exception_handler", register.http_exception_handler)  # put back afterwards
    error_responses.patch()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    register.init_exception_handler(app)
    raised: list[LoRAPluginsError] = []

    @app.get("/")
    def route():
        raise http_error(raised.pop())

    def answer(error: LoRAPluginsError):
        raised.append(error)
        return TestClient(app, raise_server_exceptions=False).get("/")

    return answer


@pytest.mark.parametrize(
    ("kind", "status", "retry"),
    [
        (AdapterNotFound, 404, None),
        (IncompatibleAdapter, 400, None),
        (InvalidAdapter, 400, None),
        (SourceUnavailable, 503, "2"),
        (NoFreeSlot, 503, "1"),
        (OutOfMemory, 507, None),
    ],
)
def test_vllms_handlers_answer_with_our_status_text_and_headers(answered, kind, status, retry):
    response = answered(kind("x\ud800", adapter="sql", remedy="copy it"))
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry)
    message = response.json()["error"]["message"]
    for part in (f"[{kind.code}]", "'sql'", "copy it"):
        assert part in message


@pytest.mark.parametrize(("plugin", "count"), [("is_resolver_registered", 1), ("is_manager_patched", 1), (None, 0)])
def test_vllms_metrics_router_brings_the_middleware(process, plugin, count):
    from fastapi import FastAPI
    from vllm.entrypoints.serve.instrumentator import metrics

    process.settings = Settings()
    if plugin:
        setattr(process, plugin, True)
    for _ in range(2):
        app_module.patch()
    app = FastAPI()
    metrics.attach_router(app)
    assert [one.cls for one in app.user_middleware].count(AnswerForAdapters) == count


@runs
async def test_an_error_is_answered_as_the_application_does() -> None:
    from fastapi import FastAPI, HTTPException
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "app": app}
    for error, status in ((NoFreeSlot("x"), 503), (IncompatibleAdapter("x"), 400)):
        answer = await app_module._answer(scope, http_error(error))
        assert answer.status_code == status
        assert error.code in answer.body.decode()
    assert (await app_module._answer(scope, HTTPException(418, "tea"))).status_code == 418


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_routes_answer_with_our_status_and_headers(monkeypatch, caplog, path) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.anthropic import api_router
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    async def refuse(self, *_):
        raise http_error(SourceUnavailable("no answer", adapter="sql"))

    for step in ("create_chat_completion", "render_chat_request"):
        monkeypatch.setattr(AnthropicServingMessages, step, refuse)
    for method in ("create_messages", "count_tokens"):
        monkeypatch.setattr(AnthropicServingMessages, method, getattr(AnthropicServingMessages, method))
    error_responses.patch()
    app = FastAPI()
    app.state.enable_server_load_tracking = False
    app.state.anthropic_serving_messages = serving = object.__new__(AnthropicServingMessages)
    serving._merge_inline_system = False
    app.include_router(api_router.router)
    app.add_middleware(AnswerForAdapters, answer=app_module._answer)
    message = {"model": "sql", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    answer = TestClient(app, raise_server_exceptions=False).post(path, json=message)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "2"), answer.text
    assert (answer.json()["type"], "[L006]" in answer.json()["error"]["message"]) == ("error", True)
    assert not caplog.records


def test_only_records_of_our_refusals_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BufferingHandler(100)
    monkeypatch.setattr(serving.logger, "filters", [])
    monkeypatch.setattr(serving.logger, "handlers", [written])
    error_responses.patch()
    try:
        try:
            raise LoRAPluginsError("no place", adapter="sql")
        except LoRAPluginsError as refusal:
            raise http_error(refusal) from None
    except Exception:
        serving.logger.exception("ours")
    try:
        raise ValueError("vLLM's")
    except ValueError:
        serving.logger.exception("another's")
    serving.logger.error("without an exception")
    assert [record.getMessage() for record in written.buffer] == ["another's", "without an exception"]


@pytest.fixture
def logger(base: Path) -> Iterator[Any]:
    yield PrometheusStatLogger(vllm_config(base))
    unregister_vllm_metrics()


def record(logger: Any, running: str) -> None:
    logger.record(SchedulerStats(running_lora_adapters=dict.fromkeys(running.split(","), 1)), None)


def series() -> dict[str, float]:
    forget_old_series()
    found = next(metric for metric in REGISTRY.collect() if metric.name == NAME)
    return {sample.labels["running_lora_adapters"]: sample.value for sample in found.samples}


def test_sets_that_ran_long_ago_lose_their_series(logger: Any) -> None:
    for i in range(3 * MOST_SERIES):
        record(logger, f"sql-{i},chat")
    assert list(series()) == [f"sql-{i},chat" for i in range(2 * MOST_SERIES, 3 * MOST_SERIES)]


def test_set_that_runs_again_is_the_latest(logger: Any) -> None:
    record(logger, "first")
    for i in range(MOST_SERIES - 1):
        record(logger, f"sql-{i}")
    record(logger, "first")
    record(logger, "one-more")
    found = series()
    assert "first" in found
    assert "sql-0" not in found
    assert max(found, key=found.__getitem__) == "one-more"
