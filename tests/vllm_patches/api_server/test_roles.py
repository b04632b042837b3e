"""What living API servers read of a dead one, in vLLM's shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import uvicorn
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.v1.engine.admission_control import SharedAdmissionStats

from lora_plugins.vllm_patches.api_server.roles import _count_no_more


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
