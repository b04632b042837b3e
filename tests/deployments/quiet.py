"""What holds of every server once its clients have their answers: nothing runs, is held, or is used any more."""

from __future__ import annotations

import re
import time

import httpx

from testbed.server import Server
from tests.e2e.standing_still import LONGEST_S

FATAL = (
    "EngineDeadError",
    "EngineCore encountered a fatal error",
    "EngineCore failed",
    "exception was never retrieved",
)


def metric(server: Server, name: str) -> float:
    """The sum of all series of this name on /metrics."""
    page = httpx.get(f"{server.url}/metrics", timeout=LONGEST_S).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


def assert_quiet(server: Server) -> None:
    """Soon, the figures of requests are 0, no adapter is in use, and the engine has never crashed."""
    ends = time.monotonic() + LONGEST_S
    while (left := _left(server)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert left == {}
    assert server.process.poll() is None
    log = server.log()
    assert [sign for sign in FATAL if sign in log] == []


def _left(server: Server) -> dict[str, float]:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lora_plugins_held")
    left = {name: value for name in names if (value := metric(server, name))}
    for view in httpx.get(f"{server.url}/v1/loras", timeout=LONGEST_S).json()["loras"]:
        if in_use := view["requests_held"] + view["requests_in_flight"]:
            left[view["lora_name"]] = in_use
    return left
