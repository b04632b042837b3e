"""What all tests share: marks by folder, what runs in one process, hypothesis's profile, vLLM's logger for caplog."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tests run in several processes: more threads of each would only wait for each other. Before anything imports PyTorch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from testbed import triton_interpreter  # noqa: F401 - before anything imports Triton
from tests import certificates, forked_workers
from tests.repetitions import IS_LONG, times
from tests.seconds import of_files

# The same examples in every run: a failure is reproducible. No deadline: these machines share their cores.
settings.register_profile(
    "unit",
    derandomize=True,
    deadline=None,
    max_examples=times(150, short=60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")
certificates.share()

_E2E = Path(__file__).parent / "e2e"
_MODELS = Path(__file__).parent / "models"
_ENGINES = {
    _E2E,
    _MODELS,
    *(Path(__file__).parent / name for name in ("deployments", "front_ends", "v2_runner", "walkthroughs")),
}
# Files of end-to-end tests that share a server run in one process: xdist would start it in each.
_SHARED = {
    **dict.fromkeys(("test_answers", "test_default_adapters", "test_refusals", "test_sources"), "world"),
    **dict.fromkeys(("test_admission", "test_in_flight", "test_pause"), "one_slot"),
    **dict.fromkeys(("test_answers_of_models", "test_verdicts_of_models"), "models"),
}
_GPU_PROGRAMS = Path(__file__).parent / "benchmarks" / "gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark end-to-end tests, and put the longest files first, so that short ones fill up what is left of the time.

    What is marked `nightly` runs in `make test-long`, or where `-m` names it.
    """
    for item in items:
        if _ENGINES & set(item.path.parents):
            item.add_marker(pytest.mark.e2e)
        if _GPU_PROGRAMS in item.path.parents:
            item.add_marker(pytest.mark.nightly)
    if not IS_LONG and "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    seconds: Counter[str] = Counter()
    for file, of_file in of_files().items():
        seconds[_group(file)] += of_file
    items.sort(key=lambda item: -seconds[_group(item.nodeid.partition("::")[0])])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What it imports stays: no collection of garbage looks through it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail where tests of one server are in files that `_SHARED` does not group: each process would start its own."""
    if _E2E in item.path.parents:
        names = set(getattr(item, "fixturenames", ())) & set(_SHARED.values())
        if names - {_SHARED.get(item.path.stem)}:
            pytest.fail(f"uses {', '.join(names)}; name {item.path.stem} in _SHARED of tests/conftest.py for it")


def _group(file: str) -> str:
    """What runs in one process, in one go: a file, or all files that share a server."""
    return _SHARED.get(Path(file).stem, file) if "/e2e/" in file or "/models/" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute by file, and by server where files share one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    return ByServer(config, log)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was imported before is not looked through again by each collection of garbage: with vLLM, a second each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    if not forked_workers.has_imported:  # those end before the interpreter does, and pytest looks through all
        gc.unfreeze()  # libraries report what is left at the end


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
