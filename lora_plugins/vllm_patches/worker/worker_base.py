"""vLLM's workers carry out the scheduler's commands: before the batch of the commands, and in the background.

Runs in each worker's process. In comes a `SchedulerOutput` with commands; our manager (`worker/manager.py`) begins
them, vLLM computes the batch, and the `ModelRunnerOutput` goes back with reports. Wrapped are methods of
`WorkerWrapperBase`, through which executors call a worker (vllm/v1/worker/worker_base.py, 0.30 to 0.33). Workers also
get methods `lora_plugins_…`, which the engine core calls by `collective_rpc` while no steps are made.

Touches:
    vllm.v1.worker.worker_base: WorkerWrapperBase{worker, vllm_config}
        WorkerBase{model_runner, vllm_config, sample_tokens(self, grammar_output)}
    vllm.v1.outputs: AsyncModelRunnerOutput.get_output(self)
Why: every executor but Ray's first calls the wrapped methods; collective_rpc reaches ours by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.model_modules import ModelModules
from lora_plugins.process import this_process
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.scheduler.messages import Change, Command, Report
from lora_plugins.vllm_patches.engine_modules import model_of
from lora_plugins.vllm_patches.message_fields import attach_reports, commands_of
from lora_plugins.vllm_patches.worker import lora_model_runner_mixin, model_runner
from lora_plugins.vllm_patches.wrapping import wrap

# Without a batch, a step waits so long for loads in the background: the engine need not spin.
EMPTY_STEP_WAIT_S = 0.005
# Beside other data-parallel ranks a dummy batch follows, and all ranks wait for the slowest.
EMPTY_STEP_OF_RANKS_WAIT_S = 0.0005


def patch() -> None:
    """Have every worker of this process carry out commands."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    lora_model_runner_mixin.patch(settings=this_process().settings, make_resolver=_make_resolver)
    wrap(WorkerWrapperBase, "init_device", _init_device)
    wrap(WorkerWrapperBase, "execute_model", _execute_model)
    # Set, not wrapped: vLLM's wrapper has no `sample_tokens`, and passes the name on to its worker by `__getattr__`
    # (vllm/v1/worker/worker_base.py, 0.32).
    WorkerWrapperBase.sample_tokens = _sample_tokens
    for added in (_step, _changes, _forget_given, _finish_jobs, _rewrite_slots):
        setattr(WorkerBase, f"lora_plugins{added.__name__}", added)
    WorkerBase.get_lora_metrics = _metrics


def _make_resolver(base_path: str, modules: ModelModules | None) -> AdapterResolver | None:
    model = None if modules is None else model_of(modules)
    return this_process().resolver_of_worker(BaseModel(base_path, model=model))


def manager_of(worker: Any) -> Any:
    """Return our manager in a worker; None where LoRA is off.

    Raises:
        InvalidSettings: another package has replaced the manager, or a worker with LoRA has none where vLLM's has.
    """
    manager = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
    if manager is None and worker.vllm_config.lora_config is None:
        return None
    return lora_model_runner_mixin.require_planned(manager)


def _init_device(original: Any, self: Any) -> None:
    """Patch the model runner, whose modules vLLM has imported by the end of `init_device`."""
    original(self)
    model_runner.patch_runners(self.vllm_config)


def _execute_model(original: Any, self: Any, scheduler_output: Any) -> Any:
    """Begin the step's commands, compute the batch, and attach reports, unless `sample_tokens` returns the output."""
    manager = manager_of(self.worker)
    if manager is None:
        return original(self, scheduler_output)
    manager.begin_step(commands_of(scheduler_output))
    # Commands come first: the batch may need a slot that this step's commands write.
    output = original(self, scheduler_output)
    has_batch = bool(scheduler_output.total_num_scheduled_tokens)
    has_ranks = self.vllm_config.parallel_config.data_parallel_size > 1
    wait_s = 0.0 if has_batch else EMPTY_STEP_OF_RANKS_WAIT_S if has_ranks else EMPTY_STEP_WAIT_S
    # None: vLLM calls `sample_tokens` next, whose output carries the reports.
    if output is None:
        return None
    return _with_reports(output, manager.reports(wait_s), manager.jobs.take_unconfirmed() if has_batch else None)


def _sample_tokens(self: Any, grammar_output: Any) -> Any:
    """Call `sample_tokens`, which vLLM's wrapper leaves to the worker, and attach reports."""
    output = self.worker.sample_tokens(grammar_output)
    manager = manager_of(self.worker)
    if manager is None or output is None:
        return output
    return _with_reports(output, manager.reports(), manager.jobs.take_unconfirmed())


def _with_reports(output: Any, reports: list[Report], unconfirmed: Callable[[], list[Report]] | None = None) -> Any:
    if not reports and unconfirmed is None:
        return output
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    if hasattr(output, "get_output"):  # asynchronous scheduling: made in another thread
        # On the object: `get_output` is called once, and waits for the step's results (`AsyncModelRunnerOutput` in
        # vllm/v1/outputs.py, 0.32).
        get_output = output.get_output
        output.get_output = lambda: _with_reports(get_output(), reports, unconfirmed)
        return output
    if unconfirmed is not None:
        reports = [*reports, *unconfirmed()]
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        output = copy.copy(output)  # the empty output is shared
    attach_reports(output, reports)
    return output


# `self` is a worker; `collective_rpc` calls these functions by their names.


def _step(self: Any, commands: Sequence[Command], wait_s: float) -> list[Report]:
    """Carry out commands in a step without a batch."""
    manager = manager_of(self)
    manager.begin_step(commands)
    return list(manager.reports(wait_s))


def _changes(self: Any, first_number: int) -> list[Change]:
    """Return adapters that this worker was given, or had to remove, past the plan since the last call, numbered."""
    manager = manager_of(self)
    return [] if manager is None else list(manager.jobs.given.take_changes(first_number))


def _forget_given(self: Any, numbers: set[int]) -> None:
    """Drop adapters that were given past the plan, and are not planned yet."""
    manager_of(self).jobs.given.forget(numbers)


def _finish_jobs(self: Any) -> None:
    """Wait until nothing is loaded and no slot written in the background."""
    manager_of(self).jobs.finish()


def _rewrite_slots(self: Any) -> None:
    """Write every slot again, after the slots' memory may have been lost."""
    manager_of(self).rewrite_slots()


def _metrics(self: Any) -> dict[str, Any]:
    return dict(manager_of(self).lora_metrics())
