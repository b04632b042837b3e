"""What one process of vLLM has, new for each test, and a base model's directory for vLLM's scheduler to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugins import process as process_module
from lora_plugins.process import Process
from tests.worker.small_model import base_directory


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    fresh = Process()
    monkeypatch.setattr(process_module, "_process", fresh)
    return fresh


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_directory(tmp_path_factory.mktemp("base"))
