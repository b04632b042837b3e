"""Adapters that cannot be served: each failure is isolated, and the next adapter is served as if nothing had been."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.scheduler.messages import Failed, Loaded
from lora_plugins.worker import loaded_adapter
from tests.worker.small_model import (
    MORE,
    SHAPES,
    Adapter,
    Make,
    activate,
    bring,
    ended,
    evict,
    failure,
    load,
    make_adapter,
    put,
    runs,
    serve,
    slots_of,
    step,
)

Q_A = "base_model.model.layers.0.q_proj.lora_A.weight"
Q_B = "base_model.model.layers.0.q_proj.lora_B.weight"
COLUMN_A = "base_model.model.layers.1.column.lora_A.weight"
DOWN_A = "base_model.model.layers.1.down_proj.lora_A.weight"
BAD = 9


def nan_at(value: float) -> torch.Tensor:
    tensor = torch.zeros(4, 16)
    tensor[3, 15] = value
    return tensor


def cut(file: Path, n_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:-n_bytes])


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ELSEWHERE = {
    Q_A.replace("layers.0", "layers.7"): torch.ones(4, 16),
    Q_B.replace("layers.0", "layers.7"): torch.ones(16, 4),
}
# What becomes of it, how `make_adapter` makes it, and what is then done to its directory.
BROKEN: dict[str, tuple[str, dict[str, Any], Callable[[Path], object]]] = {
    "vanished": ("AdapterNotFound", {}, shutil.rmtree),
    "no configuration": ("AdapterNotFound", {}, lambda at: (at / CONFIG).unlink()),
    "no weights": ("InvalidAdapter", {}, lambda at: (at / WEIGHTS).unlink()),
    "configuration that is no JSON": ("InvalidAdapter", {}, lambda at: cut(at / CONFIG, 2)),
    "truncated": ("InvalidAdapter", {}, lambda at: cut(at / WEIGHTS, 100)),
    "rank too large": ("InvalidAdapter", {"rank": 16}, Path.exists),
    "rank larger than it says": ("IncompatibleAdapter", {"rank": 16, "r": 4, "lora_alpha": 8}, Path.exists),
    "A too narrow": ("IncompatibleAdapter", {"change": {Q_A: torch.ones(4, 15)}}, Path.exists),
    "A too wide": ("IncompatibleAdapter", {"change": {DOWN_A: torch.ones(4, 33)}}, Path.exists),
    "B too short": ("IncompatibleAdapter", {"change": {Q_B: torch.ones(15, 4)}}, Path.exists),
    "A of one dimension": ("InvalidAdapter", {"change": {Q_A: torch.ones(4)}}, Path.exists),
    "NaN": ("InvalidAdapter", {"change": {Q_A: nan_at(torch.nan)}}, Path.exists),
    "no module matches": ("IncompatibleAdapter", {"prefix": "towers.{}."}, Path.exists),
    "some modules do not match": ("IncompatibleAdapter", {"change": ELSEWHERE}, Path.exists),
    "B without A": ("InvalidAdapter", {"drop": [COLUMN_A]}, Path.exists),
    "A and B of different ranks": ("InvalidAdapter", {"change": {Q_A: torch.ones(2, 16)}}, Path.exists),
    "nothing in it": ("InvalidAdapter", {"modules": {}}, Path.exists),
}


def broken(directory: Path, name: str) -> Adapter:
    _, options, damage = BROKEN[name]
    made = make_adapter(directory, BAD, **options)
    damage(made.path)
    return made


@pytest.fixture
def others(tmp_path: Path) -> list[Adapter]:
    return [make_adapter(tmp_path / f"good-{adapter_id}", adapter_id) for adapter_id in (1, 2)]


def others_are_still_served(manager: Any, others: list[Adapter]) -> None:
    """The bad one leaves nothing behind once the scheduler evicts it, and two others use both slots."""
    evict(manager, make_nothing(BAD))
    assert BAD not in manager.list_adapters()
    assert not any(slot is not None and slot < 0 for slot in slots_of(manager)), "a slot is still reserved"
    assert BAD not in slots_of(manager)
    for slot, adapter in enumerate(others):
        if adapter.adapter_id in manager.list_adapters():
            evict(manager, adapter)
        serve(manager, adapter, slot)
    assert runs(manager, *others)
    assert manager.list_adapters() == {adapter.adapter_id for adapter in others}


def make_nothing(adapter_id: int) -> Adapter:
    return Adapter(adapter_id, Path("/nowhere"), {}, {})


@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_disk_failure_is_isolated(
    make_manager: Make, tmp_path: Path, others: list[Adapter], name: str
) -> None:
    manager = make_manager(slots=2)
    serve(manager, others[0], 0)
    step(manager, others[0])
    bad = broken(tmp_path / "bad", name)
    error = failure(manager, bad)
    assert (type(error).__name__, error.adapter) == (BROKEN[name][0], bad.name), error
    assert runs(manager, others[0])
    others_are_still_served(manager, others)


@pytest.mark.parametrize("name", ["vanished", "no weights", "truncated", "rank too large", "A too wide"])
def test_broken_on_disk_and_added_by_others(
    make_manager: Make, tmp_path: Path, others: list[Adapter], name: str
) -> None:
    manager = make_manager(slots=2)
    serve(manager, others[0], 0)
    bad = broken(tmp_path / "bad", name)
    with pytest.raises(LoRAPluginsError):
        manager.add_adapter(bad.request())
    assert manager.list_adapters() == {1}
    assert slots_of(manager) == [1, None]
    others_are_still_served(manager, others)


def test_by_setting_what_does_not_match_is_left_out(
    make_manager: Make, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(env={"LORA_PLUGINS_UNMATCHED": "warn"})
    adapter = make_adapter(tmp_path / "a", BAD, change=ELSEWHERE)
    serve(manager, adapter, 0)
    assert runs(manager, adapter)
    assert "layers.7.q_proj" in logged.text
    error = failure(manager, make_adapter(tmp_path / "b", 1, prefix="towers.{}."))
    assert error.code == "L003", "nothing of it would be served"
    assert "towers.0.column" in error.found
    assert "layers.0." in (error.expected or "")


def test_some_of_an_adapters_modules_are_enough(make_manager: Make, tmp_path: Path) -> None:
    """An adapter need not have weights for every module, nor for every part of a packed one."""
    modules = {name: SHAPES[name] for name in ("v_proj", "up_proj")} | MORE
    manager = make_manager(slots=1)
    full, some = make_adapter(tmp_path / "full", 1), make_adapter(tmp_path / "some", 2, modules=modules)
    for adapter in (full, some):
        assert isinstance(bring(manager, adapter), Loaded)
    for adapter in (full, some, full, some):
        put(manager, adapter, 0)
        assert runs(manager, adapter), "nothing of the one before is left"


# --- failures that lie in the machine, at each step of the way ---


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


MACHINE: dict[str, tuple[BaseException, str]] = {
    "out of memory": (MemoryError("no room"), "OutOfMemory"),
    "out of memory, as torch says it": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        "OutOfMemory",
    ),
    "anything": (RuntimeError("odd"), "InvalidAdapter"),
    "an end of the thread": (SystemExit("now"), "InvalidAdapter"),
}


@pytest.mark.parametrize("name", MACHINE)
@pytest.mark.parametrize("where", ["reading", "merging", "copying", "writing a slot"])
def test_a_failing_machine_fails_one_adapter_once(
    make_manager: Make, tmp_path: Path, others: list[Adapter], monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    manager = make_manager(slots=2)
    serve(manager, others[0], 0)
    error, kind = MACHINE[name]
    module = next(reversed(manager._adapter_manager.modules.values()))
    place, attribute = {
        "reading": (manager._lora_model_cls, "from_local_checkpoint"),
        "merging": (manager._adapter_manager, "_create_merged_loras_inplace"),
        "copying": (loaded_adapter, "Block"),
        "writing a slot": (module, "set_lora"),
    }[where]
    bad = make_adapter(tmp_path / "bad", BAD)
    is_loaded = where == "writing a slot" and isinstance(bring(manager, bad), Loaded)
    with monkeypatch.context() as patch:
        patch.setattr(place, attribute, raising(error))
        report = ended(manager, activate(manager, bad, 1) if is_loaded else load(manager, bad))
    assert isinstance(report, Failed)
    found = report.error
    assert (type(found).__name__, found.adapter) == (kind, bad.name)
    with pytest.raises(RuntimeError, match="in no slot"):  # the engine's end, rather than a text of another model
        step(manager, bad)
    others_are_still_served(manager, others)
    evict(manager, others[1])
    serve(manager, bad, 1)  # it was not the adapter's fault
    assert runs(manager, bad)
