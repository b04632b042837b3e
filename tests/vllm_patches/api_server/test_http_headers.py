"""Status, text and headers of our errors on responses of vLLM's own exception handlers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
from lora_plugins.vllm_patches.api_server import http_headers


@pytest.fixture
def answered(monkeypatch):
    """A function from one of our errors to the response of an application with vLLM's own exception handlers."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling import register

    monkeypatch.setattr(register, "http_exception_handler", register.http_exception_handler)  # put back afterwards
    http_headers.keep_http_headers()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    register.init_exception_handler(app)
    errors: list[LoRAPluginsError] = []

    @app.get("/")
    def route():
        raise http_error(errors.pop())

    def answer(error: LoRAPluginsError):
        errors.append(error)
        return TestClient(app, raise_server_exceptions=False).get("/")

    return answer


@pytest.mark.parametrize(
    ("kind", "status", "retry"),
    [
        (AdapterNotFound, 404, None),
        (IncompatibleAdapter, 400, None),
        (InvalidAdapter, 400, None),
        (SourceUnavailable, 503, "5"),
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
