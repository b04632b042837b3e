"""Commands before an application on Ray Serve, which answers with a row for each replica."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

from lora_plugins.api.models import VersionStatus
from lora_plugins.cli.server import AdminClient
from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError

_DONE = {"status": "success", "message": "", "lora_name": "sql", "lora_id": 1, "digest": "a" * 64}
_REFUSED = {"error": {"message": "[L003] adapter 'sql': found rank 64; expected 16. To fix: train again."}}


def ask(monkeypatch: pytest.MonkeyPatch, *bodies: dict[str, Any]) -> VersionStatus:
    rows = [
        {"replica": f"r{it}", "status": 400 if "error" in body else 200, "body": body} for it, body in enumerate(bodies)
    ]

    def answer(*_: Any, **__: Any) -> io.BytesIO:
        body, worst = io.BytesIO(json.dumps({"replicas": rows}).encode()), max(row["status"] for row in rows)
        if worst > 200:
            raise urllib.error.HTTPError("", worst, "", Message(), body)
        return body

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return AdminClient("http://ray", 1).ask(VersionStatus, "PUT", "/sql")


def test_replicas_of_one_digest_answer_as_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, _DONE, _DONE).digest == "a" * 64
    with pytest.raises(LoRAPluginsError, match="no VersionStatus"):
        ask(monkeypatch, _DONE, {**_DONE, "digest": "b" * 64})


def test_an_error_says_what_each_replica_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleAdapter, match="found rank 64; expected 16"):
        ask(monkeypatch, _REFUSED, _REFUSED)
    with pytest.raises(LoRAPluginsError, match=r"replica r1: 400 \[L003\].*; replica r0: 200"):
        ask(monkeypatch, _DONE, _REFUSED)
