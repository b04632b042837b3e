"""Adapters that a caller's own code adds or removes in the workers, by `collective_rpc`: the planner learns of them.

Runs in the engine core, around each `collective_rpc`. RL frameworks call their own functions in workers, which hand
weights to the worker's LoRA manager without the planner. A worker loads such an adapter at once
(`worker/given_to_worker.py`). After each call, the engine core asks all workers which adapters they were given. If all
were given the same, the planner begins a new generation (`scheduler/state.py` has the words), whose `Load` finds the
weights by their number (`AdapterSpec.given`). Adapters that only some workers have, or that have no room, are forgotten
everywhere, and the caller gets an error.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from lora_plugins.errors import InvalidAdapter
from lora_plugins.scheduler.messages import Change, Outcome
from lora_plugins.vllm_patches.engine_core.utilities import answer_of, then, true_or_raise


def collective_rpc(original: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the workers as vLLM does; return once the planner has the adapters that the call has added or removed.

    Touches:
        vllm.v1.engine.core: EngineCore{model_executor, collective_rpc(self, method, timeout, args, kwargs)}
        vllm.v1.executor.abstract: Executor.collective_rpc(self, method, timeout, args, ...)
    Why: what workers were given past the plan would be in no slot, and count in no budget.
    """
    if method == "take_notifications":  # vLLM calls this in its own loop (vllm-project/vllm#51433)
        return original(self, method, *args, **kwargs)
    try:
        result = original(self, method, *args, **kwargs)
    except Exception:
        # Some workers may have taken adapters before the error.
        _forget(self, _changes(self))
        raise
    of_workers = _changes(self)
    if not any(of_workers):
        return result
    agreed = _agreed(of_workers)
    if agreed is None:
        _forget(self, of_workers)
        raise InvalidAdapter(
            "workers that were given different adapters, or in another order",
            expected="the same in each worker",
            remedy="give every worker the same, in one collective_rpc",
        )

    # The caller of `collective_rpc` gets the workers' own result.
    def end(answer: Outcome) -> Any:
        if answer.error is not None:
            _forget(self, of_workers, is_planned=True)
        true_or_raise(answer)
        return result

    return then(answer_of(self, self.scheduler.planner.given(agreed, time.monotonic())), end)


def _changes(core: Any) -> list[list[Change]]:
    """Return, for each worker, the adapters that the worker was given, or had to remove, since the last call.

    The n-th change of every worker gets the same number, so that a number means one adapter in all workers.
    """
    first = core.scheduler.given_numbers
    of_workers: list[list[Change]] = core.model_executor.collective_rpc("lora_plugins_changes", args=(first,))
    core.scheduler.given_numbers += max(map(len, of_workers), default=0)
    return of_workers


def _forget(core: Any, of_workers: list[list[Change]], *, is_planned: bool = False) -> None:
    """Forget these adapters in all workers, and in the planner the adapters that a worker has removed.

    With `is_planned`, the planner knows the given adapters too, and forgets them as well.
    """
    changes = [change for of_worker in of_workers for change in of_worker]
    given = {change.spec.given for change in changes if change.spec is not None}
    if given:
        core.model_executor.collective_rpc("lora_plugins_forget_given", args=(given,))
    removed = [Change(change.engine_id) for change in changes if change.spec is None or is_planned]
    core.scheduler.planner.given(removed, time.monotonic())


def _agreed(of_workers: list[list[Change]]) -> list[Change] | None:
    """Return the adapters that all workers were given, or had to remove; None where workers differ."""
    # Sizes are left out of the comparison: with tensor parallelism each worker has its own part of an adapter.
    if len({tuple((change.engine_id, change.spec is None) for change in changes) for changes in of_workers}) > 1:
        return None
    agreed = []
    # Here, all workers have the same number of changes.
    for first, *others in zip(*of_workers, strict=True):
        if first.spec is not None:
            size_bytes = max(change.spec.size_bytes for change in (first, *others) if change.spec is not None)
            first = replace(first, spec=replace(first.spec, size_bytes=size_bytes))  # noqa: PLW2901 - the largest part
        agreed.append(first)
    return agreed
