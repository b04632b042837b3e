"""Commands and reports on vLLM's own worker wrapper, outputs and mixin, with a manager that only notes them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import lora_model_runner_mixin
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from lora_plugins.errors import InvalidSettings, OutOfMemory
from lora_plugins.scheduler.messages import Activated, Failed
from lora_plugins.vllm_patches.message_fields import attach_commands, reports_of
from lora_plugins.vllm_patches.worker import worker_base
from lora_plugins.worker.manager import PlannedWorkerLoRAManager
from tests.vllm_patches.put_back import put_back

COMMAND, REPORT = object(), Activated(1, 0.5)
LOST = Failed(0, OutOfMemory("no room"), 4)


class Manager:
    """Notes commands, and has one report for each step."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.commands = events, []
        self.waited_s: list[float] = []
        self.jobs = SimpleNamespace(take_unconfirmed=self._take_unconfirmed)
        self.has_written = False

    def _take_unconfirmed(self) -> Any:
        has_written, self.has_written = self.has_written, False
        return self._lost if has_written else None

    def _lost(self) -> list[Any]:
        self.events.append("lost")
        return [LOST]

    def begin_step(self, commands: Any) -> None:
        self.events.append("commands")
        self.commands += commands

    def reports(self, wait_s: float = 0.0) -> list[Any]:
        self.waited_s.append(wait_s)
        return [REPORT]


class Worker(WorkerBase):
    """Returns `output` for every batch."""

    def __init__(self, output: Any, sampled: Any = None, *, lora: bool = True) -> None:
        self.events: list[str] = []
        self.output, self.sampled = output, sampled
        self.vllm_config = SimpleNamespace(lora_config=object() if lora else None)
        self.model_runner = SimpleNamespace(lora_manager=Manager(self.events)) if lora else SimpleNamespace()

    def execute_model(self, scheduler_output: Any) -> Any:
        self.events.append("batch")
        return self.output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.sampled


class MadeLater(AsyncModelRunnerOutput):
    def __init__(self, events: list[str] | None = None) -> None:
        self.events = [] if events is None else events

    def get_output(self) -> ModelRunnerOutput:
        self.events.append("computed")
        return output()


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with put_back(WorkerBase, WorkerWrapperBase, lora_model_runner_mixin.LoRAModelRunnerMixin):
        worker_base.patch()
        yield


def wrapper(of: Worker, *, ranks: int = 1) -> Any:
    wrapped = object.__new__(WorkerWrapperBase)
    wrapped.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=ranks))
    wrapped.worker, wrapped.mm_receiver_cache = of, None
    return wrapped


def output() -> ModelRunnerOutput:
    return ModelRunnerOutput(["a"], {"a": 0}, [[5]])


def batch(*commands: Any, tokens: int = 1) -> SchedulerOutput:
    scheduled = SchedulerOutput.make_empty()
    scheduled.total_num_scheduled_tokens = tokens
    if commands:
        attach_commands(scheduled, commands)
    return scheduled


def test_commands_come_before_the_batch_and_reports_with_its_output() -> None:
    of = Worker(output())
    found = pickle.loads(pickle.dumps(wrapper(of).execute_model(pickle.loads(pickle.dumps(batch("command"))))))
    assert of.events == ["commands", "batch"]
    assert of.model_runner.lora_manager.commands == ["command"]
    assert reports_of(found) == (REPORT,), "executors pickle both"


def test_vllms_shared_empty_output_is_copied() -> None:
    of = Worker(EMPTY_MODEL_RUNNER_OUTPUT)
    found = wrapper(of).execute_model(batch(tokens=0))
    assert reports_of(found) == (REPORT,)
    assert reports_of(EMPTY_MODEL_RUNNER_OUTPUT) == ()
    assert found == copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
    assert of.model_runner.lora_manager.waited_s == [worker_base.EMPTY_STEP_WAIT_S]


def test_an_empty_step_beside_other_ranks_is_short() -> None:
    """They wait for this rank in the dummy batch that follows it, and are computing for their own requests."""
    of = Worker(EMPTY_MODEL_RUNNER_OUTPUT)
    wrapper(of, ranks=2).execute_model(batch(tokens=0))
    (waited_s,) = of.model_runner.lora_manager.waited_s
    assert 0 < waited_s <= worker_base.EMPTY_STEP_WAIT_S / 10


def test_an_output_that_is_made_later_has_the_reports_then() -> None:
    found = wrapper(Worker(MadeLater())).execute_model(batch())
    assert reports_of(found) == ()
    assert reports_of(found.get_output()) == (REPORT,)


def test_where_tokens_are_sampled_apart_reports_come_with_them() -> None:
    wrapped = wrapper(Worker(None, sampled=output()))
    assert wrapped.execute_model(batch()) is None
    assert wrapped.worker.model_runner.lora_manager.waited_s == []
    assert reports_of(wrapped.sample_tokens(None)) == (REPORT,)


def writing(of: Worker) -> Worker:
    of.model_runner.lora_manager.has_written = True
    return of


def test_others_lost_slots_come_with_the_batch() -> None:
    wrapped = wrapper(writing(Worker(output())))
    assert reports_of(wrapped.execute_model(batch())) == (REPORT, LOST)
    assert reports_of(wrapped.execute_model(batch())) == (REPORT,)
    wrapped = wrapper(writing(Worker(None, sampled=output())))
    assert wrapped.execute_model(batch()) is None
    assert reports_of(wrapped.sample_tokens(None)) == (REPORT, LOST)


def test_others_are_asked_once_the_batch_is_computed() -> None:
    """A batch that is only launched waits for no other worker, so another may still have to write its slot."""
    of = Worker(None)
    of.output = MadeLater(of.events)
    found = wrapper(writing(of)).execute_model(batch())
    assert reports_of(found.get_output()) == (REPORT, LOST)
    assert of.events == ["commands", "batch", "computed", "lost"]


def test_a_step_without_a_batch_leaves_the_question() -> None:
    wrapped = wrapper(writing(Worker(EMPTY_MODEL_RUNNER_OUTPUT)))
    assert reports_of(wrapped.execute_model(batch(tokens=0))) == (REPORT,)
    wrapped.worker.output = output()
    assert reports_of(wrapped.execute_model(batch())) == (REPORT, LOST)


def test_without_lora_outputs_are_vllms_own() -> None:
    made = output()
    wrapped = wrapper(Worker(made, sampled=made, lora=False))
    assert wrapped.execute_model(batch()) is made
    assert wrapped.sample_tokens(None) is made
    assert reports_of(made) == ()


def test_methods_of_ours_are_reached_by_name_through_the_wrapper() -> None:
    wrapped = wrapper(Worker(output()))
    assert wrapped.lora_plugins_step([COMMAND], 0.0) == [REPORT]
    assert wrapped.worker.model_runner.lora_manager.commands == [COMMAND]


def made_by_the_mixin(monkeypatch: pytest.MonkeyPatch, kind: type) -> Any:
    """The manager in a worker whose model was loaded with this class in vLLM's place; its model is never looked at."""
    monkeypatch.setattr(lora_model_runner_mixin, "LRUCacheWorkerLoRAManager", kind)
    monkeypatch.setattr(lora_model_runner_mixin, "supports_lora", lambda _: True)
    monkeypatch.setattr(PlannedWorkerLoRAManager, "__init__", lambda self, *_, **options: vars(self).update(options))
    monkeypatch.setattr(PlannedWorkerLoRAManager, "create_lora_manager", lambda self, model, _: model)
    runner = lora_model_runner_mixin.LoRAModelRunnerMixin()
    runner.load_lora_model(SimpleNamespace(embedding_modules={}), None, "cpu")
    assert lora_model_runner_mixin.LRUCacheWorkerLoRAManager is kind, "as it was found"
    return worker_base.manager_of(SimpleNamespace(model_runner=runner))


class LoadsOtherwise(LRUCacheWorkerLoRAManager):
    def _load_adapter(self, lora_request: Any) -> Any:
        return "loaded", lora_request


class Copied:
    """Of vLLM's, and no subclass: Unsloth's form."""

    def add_adapter(self, lora_request: Any) -> bool:
        raise AssertionError

    def _apply_adapters(self, lora_requests: Any) -> None:
        raise AssertionError

    def _helped(self, lora_request: Any) -> Any:
        return "helped", lora_request

    def _load_adapter(self, lora_request: Any) -> Any:
        return self._helped(lora_request)


class PlansToo(LoadsOtherwise):
    def _apply_adapters(self, lora_requests: Any) -> None: ...


class CopiedAndMore(Copied):
    def evict(self) -> None: ...


class LoadsNothing: ...


def test_vllms_mixin_makes_and_keeps_our_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_by_the_mixin(monkeypatch, LRUCacheWorkerLoRAManager)
    assert type(made) is PlannedWorkerLoRAManager
    assert made.make_resolver is worker_base._make_resolver


@pytest.mark.parametrize(("kind", "how"), [(LoadsOtherwise, "loaded"), (Copied, "helped")])
def test_another_managers_loading_is_part_of_ours(monkeypatch: pytest.MonkeyPatch, kind: type, how: str) -> None:
    made = made_by_the_mixin(monkeypatch, kind)
    assert isinstance(made, PlannedWorkerLoRAManager)
    assert made._load_adapter("it") == (how, "it")
    assert type(made).add_adapter is PlannedWorkerLoRAManager.add_adapter


def test_a_subclass_of_our_manager_is_made_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(PlannedWorkerLoRAManager): ...

    assert type(made_by_the_mixin(monkeypatch, Ours)) is Ours


@pytest.mark.parametrize("kind", [PlansToo, CopiedAndMore, LoadsNothing])
def test_startup_fails_with_managers_that_do_more_than_load(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    with pytest.raises(InvalidSettings, match=f"test_worker_base.{kind.__name__} as the workers' LoRA manager"):
        made_by_the_mixin(monkeypatch, kind)


def test_a_manager_put_there_later_is_named_in_a_step() -> None:
    wrapped = wrapper(Worker(output()))
    wrapped.worker.model_runner.lora_manager = LoadsNothing()
    with pytest.raises(InvalidSettings, match="LoadsNothing"):
        wrapped.execute_model(batch())


def test_a_worker_with_lora_and_no_manager_is_an_error() -> None:
    """As after a rename in vLLM: without one, commands would be dropped without a word."""
    runner = vars(Worker(output()).model_runner)
    wrapped = wrapper(Worker(output(), sampled=output()))
    wrapped.worker.model_runner = SimpleNamespace(manager_of_lora=runner["lora_manager"])
    for call in (wrapped.execute_model, wrapped.sample_tokens, lambda _: wrapped.lora_plugins_step([COMMAND], 0.0)):
        with pytest.raises(InvalidSettings, match="without a manager at"):
            call(batch(COMMAND))
