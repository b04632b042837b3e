"""Several API servers: who may start, and what the living read of a dead one in vLLM's shared memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.v1.engine.admission_control import SharedAdmissionStats

from lora_plugins.errors import InvalidSettings
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server.roles import _count_no_more, take_role


async def _app(*_: Any) -> None: ...


def test_a_dead_server_accepts_nothing_and_has_no_requests() -> None:
    loads, counters = [5, 0, 7], [4] * SharedAdmissionStats.num_counters(3)
    server = NoSignalServer(uvicorn.Config(_app), peer_loads=(loads, 0))
    stats = SharedAdmissionStats({"mp_admission_counters": counters}, 3, 0)
    assert (server._least_loaded(), stats.get_num_requests()) == (False, 12)
    app, client = SimpleNamespace(state=SimpleNamespace(server=server)), SimpleNamespace(admission_stats=stats)
    _count_no_more(client, app, 1)
    assert (server._least_loaded(), stats.get_num_requests()) == (True, 8)
    _count_no_more(SimpleNamespace(), SimpleNamespace(state=SimpleNamespace()), 1)  # of a vLLM without shared memory


@pytest.mark.parametrize(
    ("plugins", "is_updating", "refusal"),
    [
        ("lora_lru_manager", False, None),
        ("lora_lru_manager", True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING with --api-server-count 2"),
        ("lora_lru_manager,lora_admin", False, "lora_admin with --api-server-count 2"),
    ],
)
def test_servers_that_do_not_know_of_each_other_change_nothing(
    monkeypatch: pytest.MonkeyPatch, plugins: str, is_updating: bool, refusal: str | None
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    client = SimpleNamespace(engine_core=SimpleNamespace(client_count=2, client_index=0))
    served: list[int] = []

    async def serve_static() -> None:
        served.append(1)

    def start() -> None:
        process = Process(Settings(runtime_lora_updating=is_updating))
        asyncio.run(take_role(SimpleNamespace(engine_client=client), process, serve_static))

    if refusal is None:
        start()
        assert served == [1]
    else:
        with pytest.raises(InvalidSettings, match=refusal) as caught:
            start()
        assert "--api-server-count 1" in caught.value.remedy, "left out, data parallelism starts several"
        assert not served
