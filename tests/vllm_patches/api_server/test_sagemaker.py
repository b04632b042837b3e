"""SageMaker's own way of naming an adapter, and the body's model where it is not used."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from lora_plugins.vllm_patches.api_server.sagemaker import keep_model_of_body

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A route with vLLM's decorator, made before the patch."""
    from model_hosting_container_standards import sagemaker
    from model_hosting_container_standards.sagemaker.lora.transforms import InjectToBodyApiTransform

    monkeypatch.setattr(InjectToBodyApiTransform, "transform_request", InjectToBodyApiTransform.transform_request)
    app = FastAPI()

    @app.post("/invocations")
    @sagemaker.inject_adapter_id(adapter_path="model")
    async def invocations(raw_request: Request) -> Any:
        return await raw_request.json()

    keep_model_of_body()
    keep_model_of_body()
    return TestClient(app)


@pytest.mark.parametrize("headers", [{}, {HEADER: ""}])
def test_a_body_keeps_its_model_without_the_header(client, headers):
    body = {"model": "team-b/sql", "prompt": "x"}
    assert client.post("/invocations", json=body, headers=headers).json() == body


def test_the_header_names_the_adapter(client):
    answer = client.post("/invocations", json={"model": "other"}, headers={HEADER: "team-a/sql"})
    assert answer.json() == {"model": "team-a/sql"}


def test_it_changes_no_level_of_a_log(client):
    level = logging.root.level
    keep_model_of_body()
    assert logging.root.level == level
