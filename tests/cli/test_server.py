"""The address of a server, as commands take it."""

from __future__ import annotations

import traceback

import pytest

from lora_plugins.cli import UsageProblem
from lora_plugins.cli.server import AdminClient
from tests.client.test_push import LOGINS


@pytest.mark.parametrize("address", LOGINS)
def test_no_error_shows_a_login(address: str) -> None:
    with pytest.raises(UsageProblem, match=r"login.*LORA_PLUGINS_ADMIN_KEY") as raised:
        AdminClient(address, 1).text("/version")
    assert "secret" not in "".join(traceback.format_exception(raised.value))
