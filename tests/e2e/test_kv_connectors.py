"""A server whose KV connector would hand blocks of one adapter to requests of another does not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.bed import Bed
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, lora_server


@pytest.mark.parametrize("plugins", [(RESOLVER,), (MANAGER,), (KERNELS,)], ids=lambda plugins: str(plugins[0]))
def test_a_connector_by_tokens_alone_is_refused_at_start(bed: Bed, tmp_path: Path, plugins: tuple[str, ...]) -> None:
    (tmp_path / "adapters").mkdir()
    transfer = json.dumps({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    arguments = ("--kv-transfer-config", transfer, "--disable-hybrid-kv-cache-manager")
    with (
        pytest.raises(RuntimeError, match=r"ended with 1") as ended,
        lora_server(bed, tmp_path, *arguments, plugins=plugins),
    ):
        pass
    assert "[L007]" in str(ended.value)
    assert "--enable-lora with the KV connector ExampleConnector" in str(ended.value)
    assert "lora-plugins explain L007" in str(ended.value)
