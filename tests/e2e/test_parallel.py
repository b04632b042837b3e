"""The manager with two engines (each has a planner) and with two workers (both load, and fetch what they lack)."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed import failing_slots
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.reference import Reference
from testbed.trained_tokens import with_tokens
from testbed.vectors import with_biases, with_factors, with_magnitudes
from tests.e2e.servers import KERNELS, MANAGER, RESOLVER, admin_server, lora_server
from tests.e2e.standing_still import LONGEST_S


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


@pytest.mark.deployment("tensor parallel", "tested", "two workers; each fetches directories that it lacks")
def test_two_workers_equal_peft_and_fetch_missing_directories(bed: Bed, tmp_path: Path) -> None:
    root, store = tmp_path / "adapters", tmp_path / "store"
    shutil.copytree(bed.adapters, root)
    reference = Reference(bed.base)
    prompt = reference.prompt_ids(PROMPT)
    # Of both halves of the vocabulary, which is divided between the workers.
    tokens = {"model.embed_tokens": prompt[-3:], "lm_head": [3, 300, bed.answers["sql"][0]]}
    with_tokens(bed.adapters / "sql", root / "trained", tokens, features=256)
    with_magnitudes(bed.adapters / "sql", root / "dora", bed.base)
    with_biases(bed.adapters / "sql", root / "biases")
    with_factors(bed.adapters / "sql", root / "ia3", bed.base)
    more = ("trained", "dora", "biases", "ia3")
    answers_of = {**bed.answers, **{name: reference.generate(root / name, prompt, MAX_TOKENS) for name in more}}
    assert all(answers_of[name] != answers_of["sql"] for name in more)
    with lora_server(
        bed,
        tmp_path,
        *("--max-loras", "2", "--max-cpu-loras", "3", "--tensor-parallel-size", "2"),
        plugins=(RESOLVER, MANAGER, KERNELS),
        VLLM_SERVER_DEV_MODE="1",  # /collective_rpc
    ) as server:
        client = connect(server)

        def wrong() -> list[str]:
            names = (*(spec.name for spec in DEMO_ADAPTERS), *more)
            answers = {name: complete(client, name, PROMPT, MAX_TOKENS) for name in names}
            return [name for name, answer in answers.items() if list(answer.token_ids) != answers_of[name]]

        assert wrong() == []
        for weights in list(store.glob("**/adapter_model.safetensors")):
            shutil.rmtree(weights.parent)
        assert wrong() == []  # more adapters than host places, so all but a few are fetched again
        answer = httpx.post(f"{server.url}/collective_rpc", json={"method": "get_lora_metrics"}, timeout=240)
        workers = answer.json()["results"]
        assert len(workers) == 2
        assert {worker["adapters"]["slots"] for worker in workers} == {2 + 3}, "copied, and pointed at host memory"
        assert all(1 <= worker["adapters"]["registered"] <= 3 for worker in workers)
        assert len({tuple(sorted(worker["memory"]["adapter_mb"])) for worker in workers}) == 1, "they hold the same"


def test_a_slot_that_one_worker_cannot_write_costs_one_adapter(bed: Bed, tmp_path: Path) -> None:
    """On the worker whose output nobody reads, before a batch: the other worker has the adapter in its slot."""
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    with lora_server(
        bed, tmp_path, "--max-loras", "2", "--max-cpu-loras", "8", "--tensor-parallel-size", "2",
        plugins=(RESOLVER, MANAGER, KERNELS, failing_slots.NAME), **failing_slots.environment(tmp_path / "site"),
    ) as server:  # fmt: skip
        client = connect(server)
        others: list[str | None] = [None, "sql"]

        def ask(*names: str | None) -> list[Any]:
            with ThreadPoolExecutor() as threads:
                return list(threads.map(lambda it: complete(client, it or str(bed.base), PROMPT, MAX_TOKENS), names))

        failing = tmp_path / "site" / failing_slots.VARIABLE
        failing.write_text("1 chat")
        for _ in range(2):
            refused, refused_too, *answers = ask("chat", "chat", *others)
            assert [list(answer.token_ids) for answer in answers] == [bed.answers[name] for name in others]
            for one in (refused, refused_too):
                assert (one.status, one.token_ids, "L004" in one.error) == (507, (), True), one
        assert "Writing a slot for adapter 'chat' failed" in server.log()
        failing.unlink()
        assert [list(answer.token_ids) for answer in ask("chat", *others)] == [
            bed.answers[name] for name in ("chat", *others)
        ]
