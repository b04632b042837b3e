"""Worker managers over a small real model, one process of vLLM's for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_plugins.worker.agreement import Agreement
from tests.worker import real_models, small_model
from tests.worker.small_model import Adapter, Make, make_adapter


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base model's directory, while vLLM's layers may be made."""
    root = tmp_path_factory.mktemp("small-model")
    with small_model.one_process(root / "rendezvous"):
        yield small_model.base_directory(root / "base")
    gc.unfreeze()  # a worker's heap is frozen, which Triton's bindings take for a leak when this process ends


@pytest.fixture
def make_manager(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes worker managers (ours, or of `kind`) with so many slots, adapters and bytes; their threads end."""
    made = []

    def make(
        *,
        slots: int = 2,
        max_adapters: int = 4,
        kind: type | None = None,
        env: dict[str, str] | None = None,
        device: Any = None,
    ) -> Any:
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        config = small_model.vllm_config(base, slots=slots, max_adapters=max_adapters)
        manager = small_model.manager_of(config, kind, device)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        if hasattr(manager, "jobs"):
            manager.jobs.close()


@pytest.fixture
def make_real_manager(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a worker manager, ours or of `kind`, over a real model; on the second of two workers with `parallel`."""
    # vLLM makes experts without gate_proj for its GPUs alone; making them computes nothing.
    like_a_gpu = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.current_platform", like_a_gpu)
    made = []

    def make(name: str, kind: type | None = None, **lora: Any) -> Any:
        config = real_models.configuration(tmp_path, name, **lora)
        if "parallel" in lora:
            monkeypatch.setattr("lora_plugins.worker.manager.agreement_of", lambda _: Agreement())
            with real_models.second_of_two_workers(monkeypatch):
                manager = real_models.manager_of(config, kind)
        else:
            manager = real_models.manager_of(config, kind)
        if kind is None:
            made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.jobs.close()


@pytest.fixture(params=["copied", "placed"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to put an adapter into a slot: copied into it, or the slot pointed at what was packed."""
    if request.param == "placed":
        small_model.use_compiled_kernels(monkeypatch)
    return str(request.param)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    """Five adapters of one size; the first one's id is 1."""
    return [make_adapter(tmp_path / f"adapter-{adapter_id}", adapter_id) for adapter_id in range(1, 6)]
