"""The endpoint plugin `lora_admin`, where it refuses to start or has nothing to do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lora_plugins import process as process_module
from lora_plugins.endpoint_plugin import AdminPlugin
from lora_plugins.errors import InvalidSettings
from lora_plugins.plugin import register_admin
from lora_plugins.process import Process


def test_the_render_server_has_nothing_to_administer() -> None:
    plugin, state = AdminPlugin(), SimpleNamespace()
    asyncio.run(plugin.init_state(None, state, SimpleNamespace()))
    assert vars(state) == {}


def test_without_the_manager_there_is_no_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_process", Process())
    monkeypatch.setenv("VLLM_PLUGINS", "lora_admin,lora_filesystem_resolver")
    with pytest.raises(InvalidSettings, match="without lora_lru_manager"):
        register_admin()


def test_not_named_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    monkeypatch.setattr(process_module, "_process", process)
    monkeypatch.setenv("LORA_PLUGINS_TYPO", "1")
    for plugins in ("", "lora_lru_manager"):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        register_admin()
    assert not process.is_resolver_registered
    monkeypatch.setenv("VLLM_PLUGINS", "lora_lru_manager,lora_admin")
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_TYPO"):
        register_admin()
