"""A client of the admin API, and the server that it asks: three slots that cost a copy, and an API key."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import PLAIN_HTTP, Answer, complete
from testbed.models import PROMPT, edit_config
from testbed.server import Server
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

KEY = "none"  # what `connect` sends
HEADERS = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Admin:
    """A server with `lora_admin`, a root that it serves by name, and a directory that URIs may name."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path
    allowed: Path

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.server.url}{path}",
            json=body,
            params=params or None,
            headers=HEADERS,
            timeout=LONGEST_S,
            verify=PLAIN_HTTP,
        )

    def done(self, method: str, path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        answer = self.call(method, path, body, **params)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ask(self, name: str) -> Answer:
        return complete(self.client, name, PROMPT, MAX_TOKENS)

    def answers_like(self, name: str, original: str) -> None:
        answer = self.ask(name)
        assert (answer.status, answer.error) == (200, "")
        assert list(answer.token_ids) == self.bed.answers[original]

    def publish(self, name: str, original: str, number: int = 0, *, below: Path | None = None) -> Path:
        """Put `original` in the place of what has this name, as a trainer does: complete, by renaming."""
        target = (below or self.root) / name
        fresh = target.with_name(f"fresh-{target.name}")
        shutil.copytree(self.bed.adapters / original, fresh)
        edit_config(fresh, revision=f"{number}")
        if target.exists():
            old = target.with_name(f"old-{target.name}")
            target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old)
        else:
            fresh.rename(target)
        return target

    def view(self, name: str) -> dict[str, Any]:
        return self.done("GET", f"/v1/loras/{name}")

    def in_worker(self) -> set[str]:
        """Engine ids of what the worker itself says that it holds."""
        answer = self.call("POST", "/collective_rpc", {"method": "get_lora_metrics"})
        (worker,) = answer.json()["results"]
        return set(worker["memory"]["adapter_mb"])

    def engine_is_free_of(self, name: str) -> bool:
        return all(view["lora_name"] != name for view in self.done("GET", "/v1/loras")["loras"])


def serving(bed: Bed, home: Path, *, is_forking: bool = True, **env: str) -> AbstractContextManager[Server]:
    uris = {"LORA_PLUGINS_ALLOWED_URIS": (home / "allowed").as_uri()}
    return admin_server(bed, home, "--max-loras", "3", "--api-key", KEY, is_forking=is_forking, **{**uris, **env})
