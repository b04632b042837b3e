"""Fifty adapters that are broken, or made to hurt, asked for in a loop beside three healthy tenants."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.models import PROMPT
from testbed.server import Server
from tests.e2e.hostile import change, make_all
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.repetitions import IS_LONG, times

HEALTHY = ("sql", "chat", "stable")
SECONDS, ALONE_S = times(300, short=1), times(60, short=1)
REST_S = 0.0 if IS_LONG else 0.3  # of a healthy tenant before it asks again
LONGEST_S = 120.0
MOST_GROWTH_BYTES = 200 << 20
HARMLESS = {"bad/nested-pluses", "bad/many-targets"}  # a pattern that no module's name matches, and names of no module


@dataclass
class Answers:
    """Of the healthy tenants: seconds of each answer, and those that are not PEFT's."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[object] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


@dataclass(frozen=True)
class Beside:
    server: Server
    bed: Bed
    root: Path
    names: tuple[str, ...]

    async def healthy(self, client: httpx.AsyncClient, name: str, answers: Answers, done: asyncio.Event) -> None:
        body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
        while not done.is_set():
            began = time.perf_counter()
            answer = await client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
            answers.seconds.append(time.perf_counter() - began)
            if answer.status_code != 200 or answer.json()["choices"][0]["token_ids"] != self.bed.answers[name]:
                answers.wrong.append((name, answer.text))
            await asyncio.sleep(REST_S)

    async def hostile(self, client: httpx.AsyncClient, until: float) -> dict[str, set[int]]:
        """Each once at least; the statuses that each was answered with."""
        statuses: dict[str, set[int]] = {name: set() for name in self.names}
        number = 0
        while number == 0 or time.perf_counter() < until:
            for name in self.names:
                change(self.root / name, number)
                answer = await client.post("/v1/completions", json={"model": name, "prompt": PROMPT, "max_tokens": 1})
                statuses[name].add(answer.status_code)
            number += 1
        return statuses

    async def run(self, seconds: float, *, is_alone: bool) -> tuple[Answers, dict[str, set[int]]]:
        answers, done = Answers(), asyncio.Event()
        async with httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S) as client:
            tenants = [asyncio.create_task(self.healthy(client, name, answers, done)) for name in HEALTHY]
            if is_alone:
                await asyncio.sleep(seconds)
                statuses = {}
            else:
                statuses = await self.hostile(client, time.perf_counter() + seconds)
            done.set()
            await asyncio.gather(*tenants)
        return answers, statuses

    @property
    def memory_bytes(self) -> int:
        """Of the API server's own process."""
        return int(psutil.Process(self.server.process.pid).memory_info().rss)


@pytest.fixture(scope="module")
def beside(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    home = tmp_path_factory.mktemp("hostile")
    shutil.copytree(bed.adapters, home / "adapters")
    names = tuple(f"bad/{name}" for name in make_all(bed.adapters / "sql", home / "adapters" / "bad"))
    assert len(names) == 50
    with lora_server(
        bed, home, "--max-loras", "4", "--max-cpu-loras", "8", "--max-model-len", "256",
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN), LORA_PLUGINS_REFRESH_S="0",
    ) as server:  # fmt: skip
        yield Beside(server, bed, home / "adapters", names)


def test_hostile_adapters_change_nothing_for_others(beside: Beside) -> None:
    """`LONG_TESTS=1`: for five minutes, and what the healthy ones wait is compared too."""
    asyncio.run(beside.run(1, is_alone=True))
    alone, _ = asyncio.run(beside.run(ALONE_S, is_alone=True))
    before_bytes = beside.memory_bytes
    together, statuses = asyncio.run(beside.run(SECONDS, is_alone=False))
    grown_bytes = beside.memory_bytes - before_bytes
    print(f"p99 {alone.p99_s:.3f} s alone, {together.p99_s:.3f} s beside them; grown by {grown_bytes >> 20} MiB")
    assert (alone.wrong, together.wrong) == ([], [])
    expected = {name: {200} if name in HARMLESS else {400, 404} for name in beside.names}
    assert {name: found for name, found in statuses.items() if not found <= expected[name]} == {}
    assert grown_bytes < MOST_GROWTH_BYTES
    assert max(together.seconds) < max(5.0, 10 * max(alone.seconds)), "everybody has waited for one"
    server = psutil.Process(beside.server.process.pid)
    assert (server.num_threads() < 200, server.num_fds() < 500) == (True, True)
    if IS_LONG:
        assert together.p99_s <= 1.2 * alone.p99_s
