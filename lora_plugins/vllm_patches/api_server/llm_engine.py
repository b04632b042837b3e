"""vLLM's offline engine (`LLM`): adapters are copied, and the output of a request without its adapter says why.

Runs in a program that uses `LLM`, in the caller's thread. Wrapped are `LLMEngine.add_lora`, `remove_lora`,
`add_request` and `step` (vllm/v1/engine/llm_engine.py, 0.30 to 0.33). A request gets the path of a copy of its
adapter's files (a snapshot). A request whose adapter cannot be loaded comes back from `step` as finished; the wrapper
puts the reason into the request's output.

Touches:
    vllm.v1.engine.llm_engine:
        LLMEngine{add_request(self, request_id, prompt, params, arrival_time, lora_request, ...),
            remove_lora(self, lora_id)}
    vllm.outputs: RequestError{code, message, retryable} # since 0.32
Why: prefix-cache keys hold (name, path), and files may change or go; a stop reason, or a tensor for pooling, carries
    the error.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.lifecycle.snapshots import only_engines_have
from lora_plugins.log import logger
from lora_plugins.vllm_patches.api_server.async_llm import has_planner, known_snapshots, remove_lora, snapshots_of
from lora_plugins.vllm_patches.message_fields import error_in, error_of_output
from lora_plugins.vllm_patches.wrapping import signature_of, wrap

T = TypeVar("T")
_thread = ThreadPoolExecutor(1, "lora-plugins-snapshots")
# Errors of requests that the engine is about to refuse, by request id.
_refused: LRUCache[str, LoRAPluginsError] = LRUCache(10_000)
# An engine id and a path for each refused request, by which the engine finds nothing.
_NOWHERE, _refused_ids = "/dev/null/refused", itertools.count(1 << 29)


def patch() -> None:
    """Wrap every offline engine of this process."""
    from vllm.v1.engine.llm_engine import LLMEngine

    wrap(LLMEngine, "add_lora", _add_lora, only=has_planner)
    wrap(LLMEngine, "remove_lora", remove_lora)
    wrap(LLMEngine, "add_request", _add_request, only=has_planner)
    wrap(LLMEngine, "step", _step)


def _add_lora(original: Any, self: Any, lora_request: Any) -> Any:
    """Add the copy of an adapter; an id that the engines have from no directory stays as it is."""
    snapshots = snapshots_of(self)
    if (known := _waited_for(snapshots.by_id(lora_request))) is not None:
        return only_engines_have(known) or original(self, known)
    with snapshots.trying(lora_request, _waited_for(snapshots.take(lora_request))) as taken:
        return original(self, taken)


def _add_request(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a request; an adapter that cannot be copied ends its own request, as a failed load does."""
    call = signature_of(original).bind(self, *args, **kwargs)
    given = call.arguments.get("lora_request")
    if given is None:
        return original(self, *args, **kwargs)
    snapshots = snapshots_of(self)
    try:
        taken = snapshots.known(given) or _waited_for(snapshots.of(given))
    except LoRAPluginsError as error:
        # An exception here would end the caller's whole batch: the engine gets a path that it must refuse.
        _refused[call.arguments["request_id"]] = error
        taken = copy.copy(given)
        taken.lora_int_id, taken.lora_path = next(_refused_ids), _NOWHERE
    call.arguments["lora_request"] = taken
    return original(*call.args, **call.kwargs)


def _waited_for(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, run in a thread, as the caller's thread may run an event loop."""
    return _thread.submit(asyncio.run, work).result()


def _step(original: Any, self: Any) -> Any:
    """Make a step; explain in its outputs why requests have ended, and forget copies that were refused."""
    outputs = original(self)
    for output in outputs:
        error = _explain(output) if output.finished else None
        taken = getattr(output, "lora_request", None)  # not of a pooling request
        if error is not None and taken is not None and (snapshots := known_snapshots(self)):
            snapshots.refused(taken, error)
    return outputs


def _explain(output: Any) -> LoRAPluginsError | None:
    """Put an error's text where the user finds the text: the stop reason; for a pooling request, its own error."""
    refused, error = _refused.pop(output.request_id, None), error_of_output(output)
    if error is None:
        return None
    error = refused or error
    if hasattr(output.outputs, "data"):
        # The error's bytes are no embedding.
        output.outputs.data = output.outputs.data[:0]
        if hasattr(output, "error"):
            from vllm.outputs import RequestError

            output.error = RequestError(code=error.code, message=str(error), retryable=error.retry_after_s is not None)
    else:
        for one in output.outputs:
            if error_in(one.stop_reason) is not None:
                one.stop_reason = str(error)
    logger.warning("Request %s was not answered: %s", output.request_id, error)
    return error
