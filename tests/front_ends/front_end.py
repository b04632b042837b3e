"""A front end: one way to start API servers, what is asked at each of them, and the same answer from all."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import PLAIN_HTTP, connect
from testbed.models import PROMPT
from testbed.which_server import HEADER as WHICH
from tests.e2e.admin import HEADERS, KEY, Admin
from tests.e2e.digests import of_files
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

TENANT = "key-a"
POLICY = f"""
[default]
adapters = []
[tenants.team-a]
keys = ["{TENANT}"]
adapters = ["team-a/*"]
share = 0.1
[tenants.operators]
keys = ["{KEY}"]
admin = true
"""


@dataclass(frozen=True)
class Kind:
    """How `vllm serve` is started; `cell` is the row of the matrix of deployments that the cases are evidence for."""

    name: str
    arguments: tuple[str, ...] = ()
    count: int = 1
    cell: str = ""
    is_nightly: bool = False
    engines: int = 1


FRONT_ENDS = (
    Kind("one API server", is_nightly=True),
    Kind("three API servers", ("--api-server-count", "3"), 3, "several API servers", is_nightly=True),
    Kind("two engines", ("--data-parallel-size", "2"), 2, "data parallel, several API servers", engines=2),
    Kind(
        "two engines, four API servers",
        ("--data-parallel-size", "2", "--api-server-count", "4"),
        4,
        is_nightly=True,
        engines=2,
    ),
    Kind("two workers", ("--tensor-parallel-size", "2"), is_nightly=True),
)


@dataclass(frozen=True)
class FrontEnd(Admin):
    """A running one. Requests come on new connections, and each answer says which API server has sent it."""

    every: set[str] = field(default_factory=set)

    async def asked(
        self,
        name: str | None,
        *,
        max_tokens: int = MAX_TOKENS,
        key: str = KEY,
        path: str = "/v1/completions",
        **more: Any,
    ) -> httpx.Response:
        """One greedy completion."""
        body: dict[str, Any] = {"model": name or str(self.bed.base), "prompt": PROMPT, **GREEDY, **more}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.connected(headers) as client:
            return await client.post(path, json={**body, "max_tokens": max_tokens})

    def connected(self, headers: dict[str, str]) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S, headers=headers, verify=PLAIN_HTTP)

    def everywhere(self, name: str | None, *, count: int = 6, **more: Any) -> list[httpx.Response]:
        """Answers for a name from every API server: rounds of several requests at once, until all have answered."""
        return self._from_all(lambda: self.asked(name, **more), count)

    def called_everywhere(self, method: str, path: str, body: Any = None) -> list[httpx.Response]:
        """The answers of every API server to a call of the admin API that may be repeated."""
        return self._from_all(lambda: asyncio.to_thread(self.call, method, path, body), 6)

    def _from_all(self, ask: Callable[[], Awaitable[httpx.Response]], count: int) -> list[httpx.Response]:
        async def some() -> list[httpx.Response]:
            return await asyncio.gather(*(ask() for _ in range(count)))

        answers: dict[str, list[httpx.Response]] = defaultdict(list)
        for _ in range(40):
            for answer in asyncio.run(some()):
                answers[answer.headers[WHICH]].append(answer)
            if answers.keys() == self.every:
                return [answer for of_one in answers.values() for answer in of_one]
        raise AssertionError(f"only {answers.keys()} of {self.every} were asked")

    def is_everywhere(self, name: str, original: str, digest: str | None = None) -> None:
        """Every API server answers a name as `original`, and says the digest of what lies at the source."""
        for answer in self.everywhere(name):
            assert tokens(answer) == self.bed.answers[original]
            assert answer.headers[HEADER] == (digest or of_files(self.root / name))

    def is_nowhere(self, name: str, status: int = 404, says: str = "", **more: Any) -> str:
        """Every API server refuses a name in the same way; returns the text."""
        answers = self.everywhere(name, **more)
        assert {answer.status_code for answer in answers} == {status}, answers[0].text
        (text,) = {answer.text for answer in answers}
        assert says in text
        return text

    def leader(self) -> str:
        """The process of the API server that leads."""
        (found,) = set(re.findall(r"\(ApiServer_0 pid=(\d+)\)", self.server.log())) & self.every
        return found


GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@contextmanager
def opened(kind: Kind, bed: Bed, home: Path, **env: str) -> Iterator[FrontEnd]:
    """Start the API servers of one front end over `home`."""
    (home / "metrics").mkdir(exist_ok=True)
    (home / "policy.toml").write_text(POLICY)
    if kind.count > 1:
        # vLLM makes one before it spawns its API servers; a forked one has imported prometheus_client before.
        env["PROMETHEUS_MULTIPROC_DIR"] = str(home / "metrics")
    with admin_server(
        bed, home, "--max-loras", "2", "--api-key", KEY, TENANT, *kind.arguments,
        "--middleware", "testbed.which_server.SayWhichServer",
        LORA_PLUGINS_POLICY=str(home / "policy.toml"), LORA_PLUGINS_ALLOWED_URIS=(home / "allowed").as_uri(), **env,
    ) as server:  # fmt: skip
        front_end = FrontEnd(server, connect(server), bed, home / "adapters", home / "allowed")
        ends_at = time.monotonic() + LONGEST_S
        # The port answers as soon as one listens.
        while server.log().count("Application startup complete") < kind.count or len(front_end.every) < kind.count:
            assert time.monotonic() < ends_at, server.log()[-2000:]
            front_end.every.add(asyncio.run(front_end.asked(None, max_tokens=1)).headers[WHICH])
        yield front_end


def put(front_end: FrontEnd, name: str, original: str, **headers: str) -> httpx.Response:
    """Push an adapter as the next version of a name."""
    directory = front_end.bed.adapters / original
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = {file: (file, (directory / file).read_bytes()) for file in names}
    url = f"{front_end.server.url}/v1/loras/{name}"
    return httpx.put(url, files=files, timeout=LONGEST_S, headers={**HEADERS, **headers}, verify=PLAIN_HTTP)
