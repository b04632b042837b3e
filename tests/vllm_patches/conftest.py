"""A base model's directory, of which vLLM's scheduler reads the configuration only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.small_model import base_directory


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_directory(tmp_path_factory.mktemp("base"))
