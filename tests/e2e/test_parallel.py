"""The manager with two engines (each has a planner) and with two workers (both load, and fetch what they lack)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed import failing_slots
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.client import Answer, complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.reference import Reference
from testbed.server import Server
from testbed.trained_tokens import with_tokens
from testbed.vectors import with_biases, with_factors, with_magnitudes
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, admin_server, lora_server
from tests.e2e.standing_still import LONGEST_S

MORE = ("trained", "dora", "biases", "ia3")


@pytest.mark.nightly
@pytest.mark.deployment("data parallel, one API server", "tested", "two engines; pins and unloads reach both")
def test_two_engines_equal_peft_and_change_together(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    names = [spec.name for spec in DEMO_ADAPTERS]
    with admin_server(
        bed, tmp_path, "--max-loras", "2", "--data-parallel-size", "2", "--api-server-count", "1",
        LORA_PLUGINS_KERNELS="reference",
    ) as server:  # fmt: skip

        def call(method: str, path: str) -> Any:
            answer = httpx.request(method, f"{server.url}{path}", timeout=LONGEST_S)
            assert answer.status_code == 200, answer.text
            return answer.json()

        asked = names * 6
        answers = asyncio.run(complete_all(server, asked, PROMPT, MAX_TOKENS, at_once=10))
        assert answers == [bed.answers[name] for name in asked]
        for action in ("prefetch", "pin"):
            call("POST", f"/v1/loras/sql/{action}")
        view = call("GET", "/v1/loras/sql")
        assert (view["pinned"], set(view["tiers"])) == (True, {"store", "host", "slot"}), "in both engines"
        refused = httpx.post(f"{server.url}/v1/loras/chat/pin", timeout=LONGEST_S)
        assert (refused.status_code, "L001" in refused.text) == (503, True)
        answers = asyncio.run(complete_all(server, asked, PROMPT, MAX_TOKENS, at_once=10))
        assert answers == [bed.answers[name] for name in asked]
        assert call("DELETE", "/v1/loras/sql")["status"] == "success"
        assert all(one["lora_name"] != "sql" for one in call("GET", "/v1/loras")["loras"])
        assert list(complete(connect(server), "sql", PROMPT, MAX_TOKENS).token_ids) == bed.answers["sql"]
        engines = {line for line in httpx.get(f"{server.url}/metrics", timeout=LONGEST_S).text.splitlines()
                   if line.startswith("lora_plugins_held{")}  # fmt: skip
        assert len(engines) == 2


@dataclass(frozen=True)
class TwoWorkers:
    """A server with `--tensor-parallel-size 2`, PEFT's answers by name, and its directory."""

    server: Server
    home: Path
    answers: dict[str | None, list[int]]

    def ask(self, *names: str | None) -> list[Answer]:
        """What all are answered, asked at once."""
        client, base = connect(self.server), str(prepare().base)
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda name: complete(client, name or base, PROMPT, MAX_TOKENS), names))

    def wrong(self, *names: str | None) -> list[str | None]:
        answers = zip(names, self.ask(*names), strict=True)
        return [name for name, answer in answers if list(answer.token_ids) != self.answers[name]]


@pytest.fixture(scope="module")
def two_workers(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    home = tmp_path_factory.mktemp("two-workers")
    root = home / "adapters"
    shutil.copytree(bed.adapters, root)
    reference = Reference(bed.base)
    prompt = reference.prompt_ids(PROMPT)
    # Of both halves of the vocabulary, which is divided between the workers.
    tokens = {"model.embed_tokens": prompt[-3:], "lm_head": [3, 300, bed.answers["sql"][0]]}
    with_tokens(bed.adapters / "sql", root / "trained", tokens, features=256)
    with_magnitudes(bed.adapters / "sql", root / "dora", bed.base)
    with_biases(bed.adapters / "sql", root / "biases")
    with_factors(bed.adapters / "sql", root / "ia3", bed.base)
    answers_of = {**bed.answers, **{name: reference.generate(root / name, prompt, MAX_TOKENS) for name in MORE}}
    assert all(answers_of[name] != answers_of["sql"] for name in MORE)
    with lora_server(
        bed, home, "--max-loras", "2", "--max-cpu-loras", "3", "--tensor-parallel-size", "2",
        plugins=(RESOLVER, MANAGER, KERNELS, failing_slots.NAME), **failing_slots.environment(home / "site"),
        VLLM_SERVER_DEV_MODE="1",  # /collective_rpc
    ) as server:  # fmt: skip
        yield TwoWorkers(server, home, answers_of)


@pytest.mark.deployment("tensor parallel", "tested", "two workers; each fetches directories that it lacks")
def test_two_workers_equal_peft_and_fetch_missing_directories(two_workers: TwoWorkers) -> None:
    names = (*(spec.name for spec in DEMO_ADAPTERS), *MORE)
    assert two_workers.wrong(*names) == []
    for weights in list((two_workers.home / "store").glob("**/adapter_model.safetensors")):
        shutil.rmtree(weights.parent)
    assert two_workers.wrong(*names) == []  # more adapters than host places, so all but a few are fetched again
    url = f"{two_workers.server.url}/collective_rpc"
    workers = httpx.post(url, json={"method": "get_lora_metrics"}, timeout=240).json()["results"]
    assert len(workers) == 2
    assert {worker["adapters"]["slots"] for worker in workers} == {2 + 3}, "copied, and pointed at host memory"
    assert all(1 <= worker["adapters"]["registered"] <= 3 for worker in workers)
    assert len({tuple(sorted(worker["memory"]["adapter_mb"])) for worker in workers}) == 1, "they hold the same"


def test_a_slot_that_one_worker_cannot_write_costs_one_adapter(two_workers: TwoWorkers) -> None:
    """On the worker whose output nobody reads, before a batch: the other worker has the adapter in its slot."""
    assert two_workers.wrong("wide", "stable", "team/poet") == [], "no slot has what is asked for next"
    failing = two_workers.home / "site" / failing_slots.VARIABLE
    failing.write_text("1 chat")
    for _ in range(2):
        refused, refused_too, *answers = two_workers.ask("chat", "chat", None, "sql")
        assert [list(answer.token_ids) for answer in answers] == [two_workers.answers[name] for name in (None, "sql")]
        for one in (refused, refused_too):
            assert (one.status, one.token_ids, "L004" in one.error) == (507, (), True), one
    assert "Writing a slot for adapter 'chat' failed" in two_workers.server.log()
    failing.unlink()
    assert two_workers.wrong("chat", None, "sql") == []
