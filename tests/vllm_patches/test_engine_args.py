"""Places in host memory that a command leaves to us: as many as a batch has requests, in a part of the memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from lora_plugins.kernels.dispatch import CPU_WRAPPER
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches import engine_args
from lora_plugins.vllm_patches.engine_core.engine_planner import make_planner

SEQUENCES = 12


@pytest.fixture(autouse=True)
def patched(process: Process) -> None:
    engine_args.patch()
    process.is_manager_patched = True


@pytest.fixture
def pointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda _: CPU_WRAPPER))


def planner_of(base: Path, **flags: Any) -> Any:
    """The planner of an engine in another process."""
    arguments = EngineArgs(model=str(base), enable_lora=True, dtype="float32", max_num_seqs=SEQUENCES, **flags)
    return make_planner(pickle.loads(pickle.dumps(arguments.create_engine_config())))


@pytest.mark.usefixtures("pointed")
@pytest.mark.parametrize(
    ("flags", "max_bytes"),
    [
        ({"gpu_memory_utilization": 0.5}, 1_000_000),
        ({"gpu_memory_utilization": 0.9, "max_loras": 4}, 400_000),
        ({"kv_cache_memory_bytes": 3_000_000}, 250_000),
    ],
)
def test_unset_places_are_a_batchs_within_what_vllm_leaves(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], max_bytes: int
) -> None:
    limit = tmp_path / "memory.limit_in_bytes"  # of cgroup v1
    limit.write_text("4000000\n")
    monkeypatch.setattr(engine_args, "_LIMITS", (tmp_path / "absent", limit))
    state = planner_of(base, **flags).state
    assert (state.slots.copied, state.slots.pointed) == (flags.get("max_loras", 1), SEQUENCES)
    assert (state.cache.max_adapters, state.cache.max_bytes) == (SEQUENCES, pytest.approx(max_bytes, abs=1))


@pytest.mark.usefixtures("pointed")
def test_a_budget_of_the_operators_goes_before_ours(base: Path, process: Process) -> None:
    process.settings = Settings.from_env({"LORA_PLUGINS_HOST_MAX_BYTES": "77"})
    cache = planner_of(base).state.cache
    assert (cache.max_adapters, cache.max_bytes) == (SEQUENCES, 77)


@pytest.mark.usefixtures("pointed")
def test_places_of_the_operators_stay_without_a_limit_of_bytes(base: Path) -> None:
    cache = planner_of(base, max_cpu_loras=3).state.cache
    assert (cache.max_adapters, cache.max_bytes) == (3, None)


def test_where_slots_take_memory_vllms_defaults_stay(base: Path) -> None:
    state = planner_of(base).state
    assert (state.slots.total, state.cache.max_adapters, state.cache.max_bytes) == (1, 1, None)


@pytest.mark.usefixtures("pointed")
def test_without_our_manager_vllms_default_stays(base: Path, process: Process) -> None:
    process.is_manager_patched = False
    assert planner_of(base).state.cache.max_adapters == 1


def test_the_machines_memory_is_the_limit_of_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "_LIMITS", (tmp_path / "absent",))
    kib = int(next(it for it in Path("/proc/meminfo").read_text().splitlines() if it.startswith("MemTotal")).split()[1])
    assert engine_args.memory_bytes() == pytest.approx(kib * 1024, rel=0.01)
    (tmp_path / "absent").write_text("max")
    assert engine_args.memory_bytes() == pytest.approx(kib * 1024, rel=0.01)
