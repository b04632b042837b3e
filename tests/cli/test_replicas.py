"""Commands before an application on Ray Serve, which answers with a row for each replica."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from lora_plugins.api.http_errors import body_of
from lora_plugins.api.models import VersionStatus
from lora_plugins.cli.server_client import AdminClient
from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError, SourceUnavailable
from tests.http_server import Answer, Asked, http_server

_DONE = {"status": "success", "message": "", "lora_name": "sql", "lora_id": 1, "digest": "a" * 64}
_REFUSED = body_of(IncompatibleAdapter("rank 64", adapter="sql", expected="16", remedy="train again"))


def ask(monkeypatch: pytest.MonkeyPatch, *bodies: dict[str, Any]) -> VersionStatus:
    rows = [
        {"replica": f"r{it}", "status": 400 if "error" in body else 200, "body": body} for it, body in enumerate(bodies)
    ]

    answer = httpx.Response(max(row["status"] for row in rows), json={"replicas": rows})
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: answer)
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


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "body", ["[" * 100_000, '{"replicas": [1]}', '{"replicas": [{"status": 200}]}', '{"replicas": 1}']
)
def test_any_other_json_is_no_answer(monkeypatch: pytest.MonkeyPatch, status: int, body: str) -> None:
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: httpx.Response(status, text=body))
    with pytest.raises(LoRAPluginsError, match=r"no VersionStatus|answers HTTP 500"):
        AdminClient("http://ray", 1).ask(VersionStatus, "PUT", "/sql")


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_named_and_not_followed(method: str, status: int) -> None:
    """To https, say: a POST became a GET without a body and a key, whose answer said something else."""
    asked: list[str] = []

    def leads(request: Asked) -> Answer:
        asked.append(request.path)
        return Answer(status=status, headers={"Location": "http://localhost:9/there"})

    with (
        http_server(leads) as url,
        pytest.raises(SourceUnavailable, match=r"leads to http://localhost:.*/there.* set --url"),
    ):
        AdminClient(url, 5).ask(VersionStatus, method, "/sql")
    assert asked == ["/v1/loras/sql"]
