"""`lora_lru_manager` with two workers (tensor parallelism): both load, and both fetch what they lack."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from tests.e2e.servers import MANAGER, RESOLVER, lora_server


@pytest.mark.deployment("tensor parallel", "tested", "two workers; each fetches directories that it lacks")
def test_two_workers_equal_peft_and_fetch_missing_directories(bed: Bed, tmp_path: Path) -> None:
    root, store = tmp_path / "adapters", tmp_path / "store"
    shutil.copytree(bed.adapters, root)
    with lora_server(
        bed,
        tmp_path,
        *("--max-loras", "2", "--max-cpu-loras", "3", "--tensor-parallel-size", "2"),
        plugins=(RESOLVER, MANAGER),
        VLLM_SERVER_DEV_MODE="1",  # /collective_rpc
    ) as server:
        client = connect(server)

        def wrong() -> list[str]:
            answers = {spec.name: complete(client, spec.name, PROMPT, MAX_TOKENS) for spec in DEMO_ADAPTERS}
            return [name for name, answer in answers.items() if list(answer.token_ids) != bed.answers[name]]

        assert wrong() == []
        for weights in list(store.glob("**/adapter_model.safetensors")):
            shutil.rmtree(weights.parent)
        assert wrong() == []  # more adapters than host places, so all but a few are fetched again
        answer = httpx.post(f"{server.url}/collective_rpc", json={"method": "get_lora_metrics"}, timeout=240)
        workers = answer.json()["results"]
        assert len(workers) == 2
        assert {worker["adapters"]["slots"] for worker in workers} == {2}
        assert all(1 <= worker["adapters"]["registered"] <= 3 for worker in workers)
        assert len({tuple(sorted(worker["memory"]["adapter_mb"])) for worker in workers}) == 1, "they hold the same"
