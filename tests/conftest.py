"""What every unit test shares: a settled hypothesis profile, and vLLM's logger within reach of caplog."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator

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
