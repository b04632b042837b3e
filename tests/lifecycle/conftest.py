"""Adapters are read in this process: in virtual time nothing waits for another."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.verify import verify_adapter, verify_config
from lora_plugins.resolvers import versions
from lora_plugins.settings import Settings
from lora_plugins.verification.protocol import ReadAdapter


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


@pytest.fixture(autouse=True)
def read_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here = InThisProcess()
    monkeypatch.setattr(versions, "children", lambda: here)
