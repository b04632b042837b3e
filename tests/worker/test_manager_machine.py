"""Any order of valid commands, and of the background's jobs: slots and entries are as a naive model says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lora_plugins.scheduler.messages import Activate, Activated, Evict, Failed, Load, Loaded
from tests.repetitions import times
from tests.worker.small_model import (
    Adapter,
    differences,
    make_adapter,
    manager_of,
    slots_of,
    step,
    use_compiled_kernels,
    vllm_config,
    wrong_answers,
)
from tests.worker.test_manager import run_dummies

SLOTS, MAX_ADAPTERS = 3, 6
IDS = st.integers(1, 6)
BROKEN = 6  # its weights are cut short
OTHERS = 5  # added by others than the scheduler
PLANNED = IDS.filter(lambda number: number != OTHERS)


class Background:
    """A background thread's queue, done one by one when the machine says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self.waiting.append(job)

    def close(self) -> None:
        self.waiting.clear()


class ManagerMachine(RuleBasedStateMachine):
    """What the scheduler and the engine loop say to a worker, next to what must be in which slot.

    Attributes:
        loaded: what every worker has reported. slot_of: each adapter's slot, from the moment that it is its own.
        jobs: what is on its way, by number. copies: whether the kernels want slots written.
    """

    base: Path
    adapters: dict[int, Adapter]
    copies: bool

    @initialize()
    def start(self) -> None:
        self.manager = manager_of(vllm_config(self.base, slots=SLOTS, max_adapters=MAX_ADAPTERS))
        self.manager.jobs.close()
        jobs = self.manager.jobs
        self.background = jobs._loader = jobs._fetcher = jobs._writer = Background()
        self.loaded: set[int] = set()
        self.here: set[int] = set()
        self.slot_of: dict[int, int] = {}
        self.is_active: set[int] = set()
        self.jobs: dict[int, int] = {}
        self.number = 0

    def next_job(self, adapter_id: int) -> int:
        self.number += 1
        self.jobs[self.number] = adapter_id
        return self.number

    def take_slot(self, adapter_id: int, slot: int) -> None:
        self.slot_of = {key: value for key, value in self.slot_of.items() if value != slot}
        self.is_active &= set(self.slot_of)
        self.slot_of[adapter_id] = slot

    def may_take(self, slot: int) -> bool:
        """Whether it is not being written; one that is written is not assigned."""
        return all(key in self.is_active for key, value in self.slot_of.items() if value == slot)

    # --- what happens ---

    @rule(adapter_id=PLANNED)
    def load(self, adapter_id: int) -> None:
        if adapter_id in self.here:
            return
        self.here.add(adapter_id)
        self.manager.begin_step([Load(self.adapters[adapter_id].spec, adapter_id, self.next_job(adapter_id))])

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), slot=st.integers(0, SLOTS + MAX_ADAPTERS - 1))
    def activate(self, data: st.DataObject, slot: int) -> None:
        slot = slot % self.manager._adapter_manager.slots.total
        able = sorted(self.loaded - set(self.slot_of) - set(self.jobs.values()))
        if not able or not self.may_take(slot):
            return
        adapter_id = data.draw(st.sampled_from(able))
        self.take_slot(adapter_id, slot)
        if self.copies:
            self.manager.begin_step([Activate(adapter_id, slot, self.next_job(adapter_id))])
        else:
            self.manager.begin_step([Activate(adapter_id, slot)])
            self.is_active.add(adapter_id)

    @rule(adapter_id=PLANNED)
    def evict(self, adapter_id: int) -> None:
        if adapter_id in self.here:
            self.forget(adapter_id)
            self.manager.begin_step([Evict(adapter_id)])

    def forget(self, adapter_id: int) -> None:
        self.here.discard(adapter_id)
        self.loaded.discard(adapter_id)
        self.slot_of.pop(adapter_id, None)
        self.is_active.discard(adapter_id)
        self.jobs = {job: key for job, key in self.jobs.items() if key != adapter_id}

    @precondition(lambda self: self.background.waiting)
    @rule(count=st.integers(1, 4))
    def work(self, count: int) -> None:
        for _ in range(min(count, len(self.background.waiting))):
            self.background.waiting.pop(0)()

    @rule()
    def report(self) -> None:
        for said in self.manager.reports():
            adapter_id = self.jobs.get(said.job)
            if adapter_id is None:
                continue  # done before it was evicted: the scheduler knows no such job
            match said:
                case Failed():
                    assert adapter_id == BROKEN
                    self.forget(adapter_id)
                    self.manager.begin_step([Evict(adapter_id)])
                case Loaded():
                    assert said.is_instant is not self.copies
                    self.loaded.add(adapter_id)
                    del self.jobs[said.job]
                case Activated():
                    self.is_active.add(adapter_id)
                    del self.jobs[said.job]

    @rule(data=st.data())
    def run_a_batch(self, data: st.DataObject) -> None:
        able = sorted(self.is_active)
        chosen = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=5)) if able else []
        step(self.manager, *(self.adapters[key] for key in chosen))
        if chosen:
            assert wrong_answers(self.manager, *(self.adapters[key] for key in chosen)) == []

    @rule()
    def run_dummies(self) -> None:
        if self.number:
            run_dummies(self.manager, SLOTS)

    @rule()
    def add_another(self) -> None:
        """An adapter of which the scheduler does not know yet."""
        self.manager.add_adapter(self.adapters[OTHERS].request())
        assert OTHERS in self.manager.list_adapters()

    @rule()
    def remove_another(self) -> None:
        self.manager.remove_adapter(OTHERS)
        assert OTHERS not in self.manager.list_adapters()

    # --- what always holds ---

    @invariant()
    def every_slot_is_whose_it_should_be(self) -> None:
        if not hasattr(self, "manager"):
            return
        held = slots_of(self.manager)
        for adapter_id, slot in self.slot_of.items():
            allowed = {adapter_id}
            if adapter_id not in self.is_active:
                allowed |= {-1 - slot}
            assert held[slot] in allowed, (held, self.slot_of)
        for slot in set(range(self.manager._adapter_manager.slots.total)) - set(self.slot_of.values()):
            assert held[slot] is None, (held, self.slot_of)

    @invariant()
    def every_slot_holds_its_adapter(self) -> None:
        if not hasattr(self, "manager") or not self.copies:
            return
        for slot, adapter_id in enumerate(slots_of(self.manager)):
            if adapter_id is not None and adapter_id > 0:
                assert differences(self.manager, slot, self.adapters[adapter_id]) == []

    @invariant()
    def entries_are_those_that_were_loaded(self) -> None:
        if hasattr(self, "manager"):
            assert set(self.manager.jobs.entries) == self.here
            assert self.loaded <= self.manager.list_adapters() <= self.here | {OTHERS}

    def teardown(self) -> None:
        """Whatever is on its way ends, and is reported."""
        if not hasattr(self, "manager"):
            return
        while self.background.waiting:
            self.background.waiting.pop(0)()
        self.report()
        assert not self.jobs
        assert not self.manager.jobs.is_busy
        if self.is_active:
            assert wrong_answers(self.manager, *(self.adapters[key] for key in sorted(self.is_active))) == []


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Adapter]:
    root = tmp_path_factory.mktemp("adapters")
    made = {number: make_adapter(root / str(number), number, rank=8 if number == 4 else 4) for number in range(1, 7)}
    weights = made[BROKEN].path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    return made


@pytest.mark.parametrize("kind", ["copied", "placed"])
def test_any_order_of_commands(base: Path, six: dict[int, Adapter], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "placed":
        use_compiled_kernels(monkeypatch)
    machine = type("Machine", (ManagerMachine,), {"base": base, "adapters": six, "copies": kind == "copied"})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=times(60, short=25),
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
        ),
    )
