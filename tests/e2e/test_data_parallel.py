"""`lora_lru_manager` and `lora_admin` with two engines (data parallelism), each with a planner of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import DEMO_ADAPTERS, PROMPT
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S


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
