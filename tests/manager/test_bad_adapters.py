"""One bad adapter fails alone: its requests get the error, and slots, bytes and everybody else's requests go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins import errors
from lora_plugins.errors import LoRAPluginsError
from lora_plugins.manager import loading, worker_manager
from tests.manager.small_model import (
    MORE,
    SHAPES,
    Adapter,
    Blocked,
    ask,
    bring,
    holds,
    make_adapter,
    settled,
    slots_of,
    step,
)

Make = Callable[..., Any]
Q_A = "base_model.model.layers.0.q_proj.lora_A.weight"
Q_B = "base_model.model.layers.0.q_proj.lora_B.weight"
COLUMN_A = "base_model.model.layers.1.column.lora_A.weight"
DOWN_A = "base_model.model.layers.1.down_proj.lora_A.weight"
BAD = 9


def in_place(adapter: Adapter, file: str, change: Callable[[bytes], bytes]) -> Adapter:
    path = adapter.path / file
    path.write_bytes(change(path.read_bytes()))
    return adapter


def configured(adapter: Adapter, **changes: Any) -> Adapter:
    return in_place(adapter, "adapter_config.json", lambda data: json.dumps(json.loads(data) | changes).encode())


def without(adapter: Adapter, file: str) -> Adapter:
    (adapter.path / file).unlink()
    return adapter


def nan_at(value: float) -> torch.Tensor:
    tensor = torch.zeros(4, 16)
    tensor[3, 15] = value
    return tensor


def gone(adapter: Adapter) -> Adapter:
    adapter.vanish()
    return adapter


WEIGHTS = "adapter_model.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], Adapter], str]] = {
    "vanished": (lambda path: gone(make_adapter(path, BAD)), "AdapterNotFound"),
    "no configuration": (lambda path: without(make_adapter(path, BAD), "adapter_config.json"), "AdapterNotFound"),
    "no weights": (lambda path: without(make_adapter(path, BAD), WEIGHTS), "InvalidAdapter"),
    "configuration that is no JSON": (
        lambda path: in_place(make_adapter(path, BAD), "adapter_config.json", lambda data: data[:-2]),
        "InvalidAdapter",
    ),
    "truncated": (lambda path: in_place(make_adapter(path, BAD), WEIGHTS, lambda data: data[:-100]), "InvalidAdapter"),
    "cut in the header": (
        lambda path: in_place(make_adapter(path, BAD), WEIGHTS, lambda data: data[:50]),
        "InvalidAdapter",
    ),
    "empty": (lambda path: in_place(make_adapter(path, BAD), WEIGHTS, lambda _: b""), "InvalidAdapter"),
    "rank too large": (lambda path: make_adapter(path, BAD, rank=16), "InvalidAdapter"),
    "rank larger than it says": (
        lambda path: configured(make_adapter(path, BAD, rank=16), r=4, lora_alpha=8),
        "IncompatibleAdapter",
    ),
    "A too narrow": (lambda path: make_adapter(path, BAD, change={Q_A: torch.ones(4, 15)}), "IncompatibleAdapter"),
    "A too wide": (lambda path: make_adapter(path, BAD, change={DOWN_A: torch.ones(4, 33)}), "IncompatibleAdapter"),
    "B too short": (lambda path: make_adapter(path, BAD, change={Q_B: torch.ones(15, 4)}), "IncompatibleAdapter"),
    "A of one dimension": (lambda path: make_adapter(path, BAD, change={Q_A: torch.ones(4)}), "InvalidAdapter"),
    "NaN": (lambda path: make_adapter(path, BAD, change={Q_A: nan_at(float("nan"))}), "InvalidAdapter"),
    "infinite": (lambda path: make_adapter(path, BAD, change={Q_A: nan_at(float("-inf"))}), "InvalidAdapter"),
    "no module matches": (lambda path: make_adapter(path, BAD, prefix="towers.{}."), "IncompatibleAdapter"),
    "some modules do not match": (
        lambda path: make_adapter(path, BAD, change={Q_A.replace("layers.0", "layers.7"): torch.ones(4, 16),
                                                     Q_B.replace("layers.0", "layers.7"): torch.ones(16, 4)}),
        "IncompatibleAdapter",
    ),
    "B without A": (lambda path: make_adapter(path, BAD, drop=[COLUMN_A]), "InvalidAdapter"),
    "A without B": (lambda path: make_adapter(path, BAD, drop=[Q_B]), "InvalidAdapter"),
    "A and B of different ranks": (
        lambda path: make_adapter(path, BAD, change={Q_A: torch.ones(2, 16)}),
        "InvalidAdapter",
    ),
    "A of three dimensions": (
        lambda path: make_adapter(path, BAD, change={Q_A: torch.ones(4, 16, 1)}),
        "InvalidAdapter",
    ),
    "nothing in it": (lambda path: make_adapter(path, BAD, modules={}), "InvalidAdapter"),
}  # fmt: skip


@pytest.fixture
def others(tmp_path: Path) -> list[Adapter]:
    return [make_adapter(tmp_path / f"good-{adapter_id}", adapter_id) for adapter_id in (1, 2)]


def everybody_else_goes_on(manager: Any, others: list[Adapter]) -> None:
    """The bad one has left nothing behind once nobody waits for it, and two others use both slots."""
    manager.release("server", BAD)
    assert manager.tier.get(BAD) is None
    assert BAD not in manager.list_adapters()
    assert BAD not in slots_of(manager)
    assert not any(slot is not None and slot < 0 for slot in slots_of(manager)), "a slot is still reserved"
    for adapter in others:
        assert bring(manager, adapter) in {"ready", "staged"}
    step(manager, *others)
    assert all(holds(manager, adapter) for adapter in others)
    assert manager.tier.used_bytes == sum(adapter.size_bytes for adapter in others)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_disk(make_manager: Make, tmp_path: Path, others: list[Adapter], name: str) -> None:
    manager = make_manager(slots=2)
    bring(manager, others[0])
    step(manager, others[0])
    make, kind = BROKEN[name]
    bad = make(tmp_path / "bad")
    ask(manager, bad)
    state = settled(manager, BAD)
    assert state["state"] == "failed"
    assert (state["kind"], state["fields"]["adapter"]) == (kind, bad.name), state
    with pytest.raises(LoRAPluginsError):  # were its request in a batch all the same, no text would come of it
        step(manager, bad)
    assert BAD not in slots_of(manager)
    everybody_else_goes_on(manager, others)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_disk_and_loaded_in_the_loop(
    make_manager: Make, tmp_path: Path, others: list[Adapter], name: str
) -> None:
    manager = make_manager(slots=2)
    step(manager, *others)
    bad = BROKEN[name][0](tmp_path / "bad")
    before = manager.tier.used_bytes
    with pytest.raises(Exception) as caught:
        manager.add_adapter(bad.request())
    assert not isinstance(caught.value, AssertionError)
    assert (manager.list_adapters(), manager.tier.used_bytes) == ({1, 2}, before)
    step(manager, *others)
    assert all(holds(manager, adapter) for adapter in others)


def test_the_error_names_examples_of_both(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    ask(manager, make_adapter(tmp_path / "a", BAD, prefix="towers.{}."))
    fields = settled(manager, BAD)["fields"]
    assert "towers.0.column" in fields["found"]
    assert "layers.0." in fields["expected"]


def test_by_setting_what_does_not_match_is_left_out(
    make_manager: Make, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(env={"LORA_PLUGINS_UNMATCHED": "warn"})
    elsewhere = {
        Q_A.replace("layers.0", "layers.7"): torch.ones(4, 16),
        Q_B.replace("layers.0", "layers.7"): torch.ones(16, 4),
    }
    adapter = make_adapter(tmp_path / "a", BAD, change=elsewhere)
    assert bring(manager, adapter) == "ready"
    step(manager, adapter)
    assert holds(manager, adapter)
    assert "layers.7.q_proj" in logged.text
    ask(manager, make_adapter(tmp_path / "b", 1, prefix="towers.{}."))
    assert settled(manager, 1)["kind"] == "IncompatibleAdapter", "nothing of it would be served"


def test_some_of_an_adapters_modules_are_enough(make_manager: Make, tmp_path: Path) -> None:
    """An adapter need not have weights for every module, nor for every part of a packed one."""
    modules = {name: SHAPES[name] for name in ("v_proj", "up_proj")} | MORE
    manager = make_manager(slots=1)
    full, some = make_adapter(tmp_path / "full", 1), make_adapter(tmp_path / "some", 2, modules=modules)
    for adapter in (full, some, full, some):
        assert bring(manager, adapter, busy=[1, 2]) in {"ready", "staged"}
        step(manager, adapter)
        assert holds(manager, adapter), "nothing of the one before is left"


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
@pytest.mark.parametrize("where", ["reading", "packing", "copying", "measuring", "filling a slot"])
def test_a_failing_machine(
    make_manager: Make, tmp_path: Path, others: list[Adapter], monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    manager = make_manager(slots=2)
    step(manager, others[0])
    error, kind = MACHINE[name]
    module = next(reversed(manager._adapter_manager.modules.values()))
    place, attribute = {
        "reading": (manager._lora_model_cls, "from_local_checkpoint"),
        "packing": (manager._adapter_manager, "pack"),
        "copying": (worker_manager, "own_memory"),
        "measuring": (loading, "size_bytes"),
        "filling a slot": (module, "set_lora"),
    }[where]
    bad = make_adapter(tmp_path / "bad", BAD)
    with monkeypatch.context() as patch:
        patch.setattr(place, attribute, raising(error))
        ask(manager, bad)
        state = settled(manager, BAD)
    assert (state["state"], state["kind"], state["fields"]["adapter"]) == ("failed", kind, bad.name)
    with pytest.raises(LoRAPluginsError):
        step(manager, bad)
    assert BAD not in slots_of(manager)
    everybody_else_goes_on(manager, others)
    for adapter in others:
        manager.release("server", adapter.adapter_id)
    assert bring(manager, bad) in {"ready", "staged"}, "it was not the adapter's fault, so the next try is served"
    step(manager, bad)
    assert holds(manager, bad)


def test_a_copy_in_the_loop_that_fails_leaves_no_half_adapter(
    make_manager: Make, tmp_path: Path, others: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(slots=2)
    adapter = make_adapter(tmp_path / "a", BAD)
    bring(manager, adapter, busy=None)
    step(manager, others[0])
    module = next(reversed(manager._adapter_manager.modules.values()))
    with monkeypatch.context() as patch:
        patch.setattr(module, "set_lora", raising(RuntimeError("odd")))
        with pytest.raises(RuntimeError):
            step(manager, adapter)
    assert BAD not in slots_of(manager)
    step(manager, adapter, others[0])
    assert holds(manager, adapter)
    assert holds(manager, others[0])


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_vanished_around_staging(
    make_manager: Make, tmp_path: Path, others: list[Adapter], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    manager = make_manager(slots=2)
    adapter = make_adapter(tmp_path / "a", BAD)
    parse = manager._lora_model_cls.from_local_checkpoint

    def vanishing(*args: Any, **kwargs: Any) -> Any:
        adapter.vanish()
        return parse(*args, **kwargs)

    if when == "before":
        adapter.vanish()
    with monkeypatch.context() as patch:
        if when == "during":
            patch.setattr(manager._lora_model_cls, "from_local_checkpoint", vanishing)
        ask(manager, adapter)
        state = settled(manager, BAD)["state"]
    if when == "after":
        adapter.vanish()
        assert state == "ready"
        step(manager, adapter)
        assert holds(manager, adapter)
        assert manager.remove_adapter(BAD)
    else:
        assert state == "failed"
    everybody_else_goes_on(manager, others)


def test_a_failure_is_forgotten_with_its_last_waiter_and_tried_again(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    broken = without(make_adapter(tmp_path / "a", BAD), WEIGHTS)
    for owner in ("one", "two"):
        ask(manager, broken, owner=owner)
    assert settled(manager, BAD)["state"] == "failed"
    manager.release("one", BAD)
    assert manager.stage_state(BAD, [])["state"] == "failed", "the other has not heard of it yet"
    mended = make_adapter(tmp_path / "a", BAD)
    ask(manager, mended, owner="one")
    manager.release("two", BAD)
    assert settled(manager, BAD)["state"] == "ready"
    step(manager, mended)
    assert holds(manager, mended)


def test_removed_while_it_is_parsed(make_manager: Make, tmp_path: Path, others: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    adapter = make_adapter(tmp_path / "a", BAD)
    parse = manager._lora_model_cls.from_local_checkpoint
    entered, go = threading.Event(), threading.Event()

    class Slow(manager._lora_model_cls):
        @classmethod
        def from_local_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert go.wait(60)
            return parse(*args, **kwargs)

    manager._lora_model_cls = Slow
    ask(manager, adapter)
    assert entered.wait(60)
    manager.release("server", BAD)
    assert manager.remove_adapter(BAD) is True
    assert manager.stage_state(BAD, [])["state"] == "absent"
    assert slots_of(manager) == [None, None]
    go.set()
    everybody_else_goes_on(manager, others)


def test_removed_while_its_slot_is_filled(make_manager: Make, tmp_path: Path, others: list[Adapter]) -> None:
    manager = make_manager(slots=2)
    adapter = make_adapter(tmp_path / "a", BAD)
    blocked = Blocked(manager)
    ask(manager, adapter)
    assert blocked.entered.wait(60)
    manager.release("server", BAD)
    threading.Timer(0.05, blocked.go.set).start()
    assert manager.remove_adapter(BAD) is True
    blocked.end()
    everybody_else_goes_on(manager, others)


def test_every_error_kind_can_be_raised_anew_by_the_gate(make_manager: Make, tmp_path: Path) -> None:
    manager = make_manager()
    state = ask(manager, without(make_adapter(tmp_path / "a", BAD), WEIGHTS))
    state = settled(manager, BAD)
    error = getattr(errors, state["kind"])(**state["fields"])
    assert isinstance(error, LoRAPluginsError)
    assert error.adapter == "adapter-9"
