"""What all tests share: marks by folder, what runs in one process, hypothesis's profile, vLLM's logger for caplog."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from testbed import triton_interpreter  # noqa: F401 - before anything imports Triton

# The same examples in every run: a failure is reproducible. No deadline: these machines share their cores.
settings.register_profile(
    "unit",
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")

_E2E = Path(__file__).parent / "e2e"
# Fixtures of end-to-end tests that start a server. Those that take longest are first, and unit tests come last.
_SERVERS = ("admin", "managed", "world", "one_slot", "metered", "guarded", "kernels", "client")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark end-to-end tests, and have tests that share a server, or a file, share a process (`--dist loadgroup`)."""
    for item in items:
        if _E2E in item.path.parents:
            item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_place)


def _group(item: pytest.Item) -> str:
    if _E2E not in item.path.parents:
        return str(item.path.relative_to(_E2E.parent))
    return _server(item) or item.name


def _server(item: pytest.Item) -> str | None:
    return next((name for name in _SERVERS if name in getattr(item, "fixturenames", ())), None)


def _place(item: pytest.Item) -> int:
    if _E2E not in item.path.parents:
        return len(_SERVERS) + 1
    server = _server(item)
    return len(_SERVERS) if server is None else _SERVERS.index(server)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """caplog for our logger, also after something has imported vLLM (whose logger does not propagate)."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="vllm.lora_plugins")
    return caplog


@pytest.fixture
def permissions_count() -> Iterator[None]:
    """File modes hold for root too: this thread, and those that it starts, lose root's right to pass them over."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if libc.capget(header, sets):
        pytest.skip("root, on a system without capabilities")
    had = sets[0]
    sets[0] = had & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, sets):
        pytest.skip("root, and may not give up its right to pass over file modes")
    yield
    sets[0] = had
    assert libc.capset(header, sets) == 0
