"""Which records of vLLM's stream generators are written."""

from __future__ import annotations

from logging.handlers import BufferingHandler

import pytest
from vllm.entrypoints.openai.completion import serving

from lora_plugins.api.http_errors import http_error
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.vllm_patches.api_server import stream_logs


def test_only_records_of_our_refusals_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BufferingHandler(100)
    monkeypatch.setattr(serving.logger, "filters", [])
    monkeypatch.setattr(serving.logger, "handlers", [written])
    stream_logs.patch()
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
