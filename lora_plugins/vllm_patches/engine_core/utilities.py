"""How our calls of vLLM's engine core take arguments and answer: at once, or with a Future that vLLM answers later.

vLLM's clients call a method of the engine core by name: a utility. `utility` makes a function one, and `answer_of`
gives the planner's Future the form of an answer. In the caller's own process (offline, without multiprocessing) the
engine makes no steps during a call. So a utility makes steps without batches itself, as long as the workers have work
for its answer. It does not wait for running requests to end: only the caller can make the steps that they need.

Touches:
    vllm.v1.engine.core:
        EngineCoreProc{_convert_msgspec_args(method, args),
            _invoke_utility_method(name, get_result, output, enqueue_output)}
Why: add_lora gets a LoRARequest, and utilities that wait do not stop the engine.
Until: never: this is how vLLM calls utilities.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, get_type_hints

from lora_plugins.errors import LoRAPluginsError, NoFreeSlot
from lora_plugins.scheduler.messages import Outcome, from_plain, to_plain
from lora_plugins.scheduler.planner import Planner
from lora_plugins.vllm_patches.engine_core.scheduler import has_planner

_STEP_WAIT_S = 0.05  # how long a step waits in the workers for their jobs


def utility(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a utility: its arguments and answer cross as plain values in vLLM's messages.

    Arguments are converted to the annotated types. In an engine without a planner the utility raises RuntimeError.
    """
    # vLLM itself converts arguments of msgspec's own classes only (`_convert_msgspec_args` in vllm/v1/engine/core.py,
    # 0.32); ours are dataclasses.
    kinds = [kind for name, kind in get_type_hints(function).items() if name not in ("self", "return")]

    @functools.wraps(function)
    def wrapped(self: Any, *arguments: Any) -> Any:
        if not has_planner(self):
            raise RuntimeError("lora_plugins: this engine has no planner, as LoRA is off")
        given = zip(kinds, arguments, strict=False)  # callers may leave out the last arguments
        return then(function(self, *(from_plain(kind, plain) for kind, plain in given)), to_plain)

    return wrapped


def answer_of(core: Any, future: Future[Any], *, is_enough_to_begin: bool = False) -> Future[Outcome] | Outcome:
    """Return the outcome of a call, at once or as a Future; a `LoRAPluginsError` is in the outcome, and not raised.

    In the caller's own process, a call that would wait for running requests gets NoFreeSlot. With `is_enough_to_begin`
    (an eviction, which ends later by itself) the call gets an outcome without an error.
    """
    from vllm.v1.engine.core import EngineCoreProc

    core.scheduler.answer_calls()
    if not isinstance(core, EngineCoreProc):
        _step_while_busy(core, future)
        if is_enough_to_begin and not future.done():
            return Outcome()
        # A call that has not ended by now would wait for ever: it ends with this error.
        core.scheduler.planner.withdraw(future, _in_use(), time.monotonic())
        return _outcome(future)
    answer: Future[Outcome] = Future()
    # `_invoke_utility_method` (vllm/v1/engine/core.py, 0.32) sends the text of an exception; an `Outcome` keeps code
    # and remedy.
    future.add_done_callback(lambda done: answer.set_result(_outcome(done)))
    return answer


def _outcome(done: Future[Any]) -> Outcome:
    """Return the outcome of a future that is done: the error of this package that it ended with, or none."""
    error = done.exception()
    return Outcome(error=error) if isinstance(error, LoRAPluginsError) else Outcome()


def _in_use() -> NoFreeSlot:
    return NoFreeSlot(
        "room or slots that unfinished requests of this process use",
        expected="a place for one more adapter",
        remedy="step the engine until they have finished, or raise --max-loras or --max-cpu-loras",
    )


def then(answer: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function` of an answer, or a Future of `function` of a Future's result."""
    if not isinstance(answer, Future):
        return function(answer)
    result: Future[Any] = Future()

    def done(of_answer: Future[Any]) -> None:
        try:
            result.set_result(function(of_answer.result()))
        # `concurrent.futures` only logs what a done callback raises: the caller would wait for ever.
        except Exception as error:  # noqa: BLE001 - handed to the caller
            result.set_exception(error)

    answer.add_done_callback(done)
    return result


def true_or_raise(answer: Outcome) -> bool:
    """Return or raise as vLLM's own utilities do."""
    if answer.error is not None:
        raise answer.error
    return True


def _step_while_busy(core: Any, future: Future[Any]) -> None:
    """Make steps without batches, for a caller that steps only when it has requests."""
    scheduler = core.scheduler
    planner: Planner = scheduler.planner
    while planner.is_busy and not future.done():
        commands = scheduler.plan()
        of_workers = core.model_executor.collective_rpc("lora_plugins_step", args=(commands, _STEP_WAIT_S))
        planner.carried_out(commands)
        planner.reported([report for reports in of_workers for report in reports], time.monotonic())
        scheduler.answer_calls()
