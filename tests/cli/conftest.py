"""A command line with its own store and adapters."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from lora_plugins.cli import doctor
from lora_plugins.findings import discovered_plugins
from lora_plugins.vllm_patches import vllm_sources
from tests.cli.common import Cli
from tests.make import adapter_files, put

_discovered = functools.cache(discovered_plugins)
_changed = functools.cache(vllm_sources.changed)


@pytest.fixture(autouse=True)
def _read_what_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays as it is in a run, and the doctor takes 0.2 seconds of a core to read all packages and vLLM's files."""
    installed, changed = vllm_sources.installed(), vllm_sources.changed
    monkeypatch.setattr(doctor, "discovered_plugins", _discovered)
    monkeypatch.setattr(
        vllm_sources, "changed", lambda sources: (_changed if sources == installed else changed)(sources)
    )


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
