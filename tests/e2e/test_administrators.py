"""Who may administer a real server that has no policy; and that nobody else is told where its files lie."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.models import PROMPT, AdapterSpec, build_adapter, build_base
from testbed.server import Server
from tests.e2e.servers import admin_server


def _address_beside_loopback() -> str:
    """One of this machine's own that is not loopback, found without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address beside loopback")
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class Open:
    """A server that listens on every address, and its files."""

    server: Server
    bed: Bed
    home: Path

    def ask(self, method: str, path: str, *, far: bool = False, key: str | None = None, **more: Any) -> httpx.Response:
        url = self.server.url.replace("127.0.0.1", _address_beside_loopback()) if far else self.server.url
        headers = {**({} if key is None else {"Authorization": f"Bearer {key}"}), **more.pop("headers", {})}
        return httpx.request(method, f"{url}{path}", headers=headers, timeout=240, **more)

    def complete(self, name: str, **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        return self.ask("POST", "/v1/completions", json=body, **more)

    def answers_like(self, name: str, original: str, **more: Any) -> None:
        answer = self.complete(name, **more)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == self.bed.answers[original]


ADMIN_CALLS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/loras", None),
    ("GET", "/v1/loras/sql", None),
    ("POST", "/v1/loras", {"lora_name": "chat"}),
    ("DELETE", "/v1/loras/sql", None),
    *(
        ("POST", f"/v1/loras/sql/{verb}", None)
        for verb in ("prefetch", "pin", "unpin", "refresh", "rollback", "pause", "resume")
    ),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "by-path", "lora_path": "/x"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ("POST", "/collective_rpc", {"method": "get_lora_metrics"}),
    ("POST", "/collective_rpc%0A", {"method": "get_lora_metrics"}),  # for Starlette the same route
)


@pytest.fixture(scope="module")
def open_server(bed: Bed) -> Iterator[Open]:
    # vLLM itself takes paths below /tmp and /home out of its texts; a path below here only we do.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="a b-") as directory:
        home = Path(directory)
        shutil.copytree(bed.base, home / "base")
        shutil.copytree(bed.adapters, home / "adapters")
        weightless = shutil.copytree(bed.adapters / "sql", home / "adapters" / "missing-weights")
        (weightless / "adapter_model.safetensors").unlink()
        other = build_base(home / "other", hidden=128, layers=2)
        build_adapter(other, home / "adapters", AdapterSpec("other-base", 8), base_name="/data/train/other-7b")
        moved = replace(bed, base=home / "base")
        with admin_server(moved, home, "--host", "0.0.0.0", "--served-model-name", "tiny") as server:
            yield Open(server, bed, home)


def test_another_machines_callers_may_not_administer(open_server: Open) -> None:
    open_server.answers_like("sql", "sql")
    for method, path, body in ADMIN_CALLS:
        refused = open_server.ask(method, path, far=True, json=body)
        assert refused.status_code == 403, path
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("Forbidden", 403)
        assert error["message"].startswith("[L008] found a caller on another machine; expected ")
        assert "set LORA_PLUGINS_ADMIN_KEY for the server" in error["message"]
        proxied = open_server.ask(method, path, json=body, headers={"X-Forwarded-For": "127.0.0.1"})
        assert (proxied.status_code, "[L008]" in proxied.text) == (403, True), path
    assert open_server.ask("GET", "/v1/loras/sql").json()["state"] == "serving"


def test_everybody_may_use_adapters_and_loopback_may_administer(open_server: Open) -> None:
    open_server.answers_like("chat", "chat", far=True)
    assert open_server.ask("POST", "/v1/loras", json={"lora_name": "sql"}).status_code == 200
    assert open_server.ask("POST", "/v1/loras/sql/refresh").status_code == 200
    assert open_server.ask("DELETE", "/v1/loras/sql").status_code == 200
    body = {"lora_name": "by-path", "lora_path": str(open_server.bed.adapters / "sql")}
    assert open_server.ask("POST", "/v1/load_lora_adapter", json=body).status_code == 200
    assert open_server.ask("POST", "/v1/unload_lora_adapter", json={"lora_name": "by-path"}).status_code == 200
    (line,) = [line for line in open_server.server.log().splitlines() if "The admin API answers" in line]
    assert "WARNING" in line
    assert "callers on this machine (loopback) only" in line


def _without_paths(open_server: Open, answer: httpx.Response, *texts: str) -> None:
    message = answer.json()["error"]["message"]
    for text in ("[L00", "expected", *texts):
        assert text in message, message
    for path in (str(open_server.home), open_server.home.name, "/dev/shm", "/data", "a b-"):
        assert path not in answer.text, answer.text


def test_no_text_of_a_broken_adapter_shows_a_path(open_server: Open) -> None:
    _without_paths(open_server, open_server.complete("missing-weights", far=True), "L002", "adapter_model.safetensors")
    _without_paths(open_server, open_server.complete("other-base"), "L003", "served is tiny ('<path>')")


def test_an_unreadable_or_missing_root_shows_no_path(open_server: Open) -> None:
    root = open_server.home / "adapters"
    away = root.rename(root.with_name("away"))
    try:
        answer = open_server.complete("stable")
        shown = open_server.ask("POST", "/v1/loras", json={"lora_name": "stable"})
    finally:
        away.rename(root)
    assert answer.status_code == shown.status_code == 503
    _without_paths(open_server, answer, "no directory at '<path>'")
    assert f"no directory at '{root}'" in shown.json()["error"]["message"]
