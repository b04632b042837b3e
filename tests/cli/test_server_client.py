"""The address of a server, and the key, as commands take them."""

from __future__ import annotations

import traceback

import pytest

from lora_plugins.cli import UsageProblem
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.errors import InvalidSettings
from tests.client.test_push import KEYS, LOGINS


@pytest.mark.parametrize("address", LOGINS)
def test_no_error_shows_a_login(address: str) -> None:
    with pytest.raises(UsageProblem, match=r"login.*LORA_PLUGINS_ADMIN_KEY") as raised:
        AdminClient(address, 1).text("/version")
    assert "secret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("key", KEYS)
def test_no_error_shows_a_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv("LORA_PLUGINS_ADMIN_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(InvalidSettings, match=r"key in VLLM_API_KEY") as raised:
        AdminClient("http://127.0.0.1:9", 1).text("/version")
    assert "secret" not in "".join(traceback.format_exception(raised.value))
