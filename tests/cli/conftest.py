"""A command line with its own store and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.common import Cli
from tests.make import adapter_files, put


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    made = Cli(tmp_path, monkeypatch, capsys)
    put(made.adapters / "sql", adapter_files())
    put(made.adapters / "team" / "poet", adapter_files(lora_alpha=16))
    broken = adapter_files()
    broken["adapter_model.safetensors"] = broken["adapter_model.safetensors"][:-8]
    put(made.adapters / "cut", broken)
    return made


@pytest.fixture
def many(cli: Cli) -> Cli:
    """With one more adapter of the team."""
    put(cli.adapters / "team" / "sql", adapter_files(lora_alpha=64))
    return cli
