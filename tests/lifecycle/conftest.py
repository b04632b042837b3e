"""Adapters are read in this process: in virtual time nothing waits for another. Nor does anything wait for a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.verify import verify_adapter, verify_config
from lora_plugins.resolvers import versions
from lora_plugins.settings import Settings
from lora_plugins.verification.protocol import ReadAdapter
from tests.lifecycle.bed import Bed


class InThisProcess:
    """As `Children`."""

    def warm(self) -> None:
        """Nothing is to be started."""

    def read(self, directory: Path, settings: Settings, *, config_only: bool = False) -> Future[ReadAdapter]:
        found: Future[ReadAdapter] = Future()
        try:
            verified = verify_config(directory, settings) if config_only else verify_adapter(directory, None, settings)
            found.set_result(ReadAdapter(verified, canonical_bytes(verified.config)))
        except Exception as error:
            found.set_exception(error)
        return found


@pytest.fixture
def make_bed(tmp_path: Path) -> Callable[..., Bed]:
    return lambda **options: Bed(tmp_path / "store", **options)


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    return make_bed()


@pytest.fixture(autouse=True)
def read_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here = InThisProcess()
    monkeypatch.setattr(versions, "children", lambda: here)


@pytest.fixture(autouse=True)
def not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a test needs to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
