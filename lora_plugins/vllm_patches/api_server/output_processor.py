"""Requests to the engine name the client's request that they are part of; outputs name their versions, and are counted.

Runs in an API server, and in programs that use vLLM's engines, in `InputProcessor`, `RequestState` and
`OutputProcessor`.

Requests: a client's request becomes one or more requests to the engine, its parts: one for each beam, choice or prompt.
Each part carries the name of the client's request as a header in `EngineCoreRequest.trace_headers`, which the engine
core's scheduler takes out again. The ids of requests cannot be used, as clients choose them (`X-Request-Id`).

Outputs: the scheduler names versions in the outputs of a moved request (`engine_core/request.py`), and vLLM passes on
the names of one output only: with several choices, the last choice's; without streaming, the last output's. vLLM makes
the last output of an aborted request itself, without names. So the state of the request keeps the names.

Counts: every output of every request passes here, the end of an aborted request too. So tokens are counted here, by
adapter and by API key, when a choice ends. vLLM's stat loggers see neither a request's adapter nor aborted requests.
Where tracing is on, the span that vLLM makes of a request names the adapter and its versions.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from lora_plugins.api.access.principals import rate_of_request
from lora_plugins.events import RequestEnded
from lora_plugins.lifecycle.response import present, together
from lora_plugins.process import this_process
from lora_plugins.vllm_patches.engine_core.request import CLIENT
from lora_plugins.vllm_patches.message_fields import VERSIONS
from lora_plugins.vllm_patches.wrapping import wrap

# Attributes of the state that several choices share, or of the only choice's state: the versions so far, how many of
# the prompt's tokens were counted, and how many were subtracted from the key's limit.
_SPANS, _PROMPT, _PAID = "lora_plugins_spans", "lora_plugins_prompt_tokens", "lora_plugins_paid_tokens"
# Attributes of each choice's state: its tokens that were counted, and the limits of its key.
_GENERATED, _RATE = "lora_plugins_generated_tokens", "lora_plugins_rate"
# Attributes of a request's span: OpenTelemetry's name for the model that was asked for, and our own.
_MODEL, _DIGEST = "gen_ai.request.model", "lora_adapter.digest"
_traced: ContextVar[Any] = ContextVar("lora_plugins_traced")  # the state of the request whose span is made


def patch() -> None:
    """Have every client of this process name versions and count tokens; a second call changes nothing."""
    from vllm.v1.engine import output_processor

    wrap(output_processor.RequestState, "__init__", _init_request_state)
    wrap(output_processor.RequestState, "make_request_output", _make_request_output)
    wrap(output_processor.OutputProcessor, "do_tracing", _do_tracing)
    wrap(output_processor, "instrument_manual", _instrument_manual)


def patch_requests() -> None:
    """Have every request of this process to an engine, if it is for an adapter, name its client's request."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "assign_request_id", _assign_request_id)


def _assign_request_id(original: Any, request: Any) -> None:
    """Give each request for an adapter a header of ours, before vLLM divides the request into choices.

    Touches: vllm.v1.engine: EngineCoreRequest{trace_headers, lora_request}
    Why: parts of one client's request run together, and a pause waits for the parts; ids are chosen by clients.
    Until: vLLM's engine core learns which requests are parts of one.
    """
    original(request)
    if request.lora_request is not None:
        request.trace_headers = {**(request.trace_headers or {}), CLIENT: present().client}


def _init_request_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Note whose request it is: the loop that reads outputs runs for no request.

    Relied on: vLLM makes the state in the task of the request, or in a task that has its context.

    Why: a key's limit counts the tokens of its requests.
    Until: vLLM limits the tokens of a key.
    """
    original(self, *args, **kwargs)
    if (rate := rate_of_request()) is not None and rate.tokens_per_minute is not None:
        setattr(self, _RATE, rate)


def _make_request_output(  # noqa: PLR0917 - as vLLM has it
    original: Any,
    self: Any,
    new_token_ids: Any,
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Have `lora_versions`, once said, stand in the `kv_transfer_params` of every later output; count tokens at an end.

    Relied on: vLLM calls this for each end, an abort's too, after the stop checks, with `first_token_latency` set.

    Touches: vllm.v1.engine.output_processor: RequestState{parent_req, lora_name, detokenizer, prompt_len, stats}
    Why: vLLM makes the output of an aborted request itself, without any; a trainer must know what made its tokens.
        FinishedRequestStats, which a stat logger gets, names no adapter and leaves aborted requests out.
    Until: vLLM's outputs have a field for the versions of an adapter, and its metrics of tokens name adapters.
    """
    # `whole` stands for the client's request: the state that choices share, or the only choice's own.
    whole, said = self.parent_req or self, (kv_transfer_params or {}).get(VERSIONS, ())
    # Each output gets all spans so far: vLLM may pass on any output as the last.
    if spans := together(getattr(whole, _SPANS, ()), said):
        setattr(whole, _SPANS, spans)
        kv_transfer_params = (kv_transfer_params or {}) | {VERSIONS: spans}
    if finish_reason is not None and (self.lora_name is not None or hasattr(self, _RATE)):
        _count(self, whole, str(finish_reason))
    return original(
        self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *args, **kwargs
    )


def _do_tracing(original: Any, self: Any, engine_core_output: Any, req_state: Any, *args: Any, **kwargs: Any) -> None:
    """Know the request while vLLM makes its span, where tracing is on.

    Touches:
        vllm.v1.engine.output_processor:
            OutputProcessor.do_tracing(self, engine_core_output, req_state, iteration_stats)
    Why: the call that makes the span names no request.
    Until: vLLM's span has `gen_ai.request.model`, and a version of it.
    """
    token = _traced.set(req_state)
    try:
        original(self, engine_core_output, req_state, *args, **kwargs)
    finally:
        _traced.reset(token)


def _instrument_manual(original: Any, *args: Any, attributes: Any, **kwargs: Any) -> Any:
    """Name the adapter and its versions in the span of a request that has ended.

    Touches:
        vllm.v1.engine.output_processor: instrument_manual RequestState{lora_request}
        vllm.tracing: instrument_manual(span_name, start_time, end_time, attributes, context, kind)
    Why: vLLM's span names no model, and so no adapter.
    Until: vLLM's span has `gen_ai.request.model`, and a version of it.
    """
    if (state := _traced.get()).lora_name is not None:
        digest_of = this_process().resolver.store.layout.digest_of
        spans = getattr(state.parent_req or state, _SPANS, ()) or [(digest_of(state.lora_request.lora_path), 0)]
        digests = ",".join(dict.fromkeys(digest for digest, _ in spans if digest))
        attributes = attributes | {_MODEL: state.lora_name} | ({_DIGEST: digests} if digests else {})
    return original(*args, attributes=attributes, **kwargs)


def _count(state: Any, whole: Any, finish_reason: str) -> None:
    """Count the tokens of a choice since its last end: with an input that comes in parts, it ends several times.

    The prompt's tokens are counted once for all choices (`whole`).
    """
    process, is_pooling = this_process(), state.detokenizer is None
    generated = 0 if is_pooling else state.detokenizer.num_output_tokens()
    # Pooling makes no tokens, so that only its end says whether the engine has read the prompt.
    has_run = finish_reason not in {"abort", "error"} if is_pooling else generated > 0
    more = generated - getattr(state, _GENERATED, 0)
    # After an abort before the first token, only the engine knows how much of the prompt it has read: the key's limit
    # counts the whole prompt.
    if (rate := getattr(state, _RATE, None)) is not None and (has_run or finish_reason == "abort"):
        process.rates.spend(rate, state.prompt_len - getattr(whole, _PAID, 0) + more)
        setattr(whole, _PAID, state.prompt_len)
    if not has_run:
        return
    counted, first_token_s = getattr(whole, _PROMPT, 0), None
    if not counted and state.stats is not None:  # None with --disable-log-stats
        first_token_s = state.stats.first_token_latency
    prompt_tokens = state.prompt_len - counted
    setattr(state, _GENERATED, generated)
    setattr(whole, _PROMPT, state.prompt_len)
    if state.lora_name is not None:
        process.events.emit(RequestEnded(state.lora_name, prompt_tokens, more, first_token_s))
