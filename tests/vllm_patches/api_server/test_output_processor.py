"""vLLM's own output processor: what it makes of the outputs of a request that was moved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine import output_processor as vllms
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from lora_plugins.api.access.policy import Principal
from lora_plugins.api.access.principals import principal_of_request
from lora_plugins.events import Events, RequestEnded
from lora_plugins.lifecycle.principal_limits import Rate, Rates
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import output_processor
from lora_plugins.vllm_patches.engine_core.request import CLIENT
from tests.vllm_patches.engine_bed import adapter

OLD, NEW = "a1" * 32, "b2" * 32
MOVED = [(OLD, 0), (NEW, 2)]


class Asked:
    """One request of `choices`, whose outputs the engine sends by hand."""

    def __init__(self, kind: RequestOutputKind, choices: int = 1, *, is_traced: bool = False) -> None:
        self.processor = OutputProcessor(None, log_stats=True, tracing_enabled=is_traced)
        self.queue = RequestOutputCollector(kind, "r")
        params = SamplingParams(detokenize=False, output_kind=kind, n=choices)
        whole = self.request("r", params)
        parent = ParentRequest(whole) if choices > 1 else None
        for index in range(choices):
            name, own = parent.get_child_info(index) if parent else ("r", params)
            self.processor.add_request(self.request(name, own), None, parent, index, self.queue)
        self.names = list(self.processor.request_states)

    @staticmethod
    def request(name: str, params: SamplingParams) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=name,
            external_req_id="r",
            prompt_token_ids=[3, 4],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time() - 5.0,
            lora_request=adapter(1),
            cache_salt=None,
            data_parallel_rank=None,
        )

    def answers(self, of: int = 0, *, versions: Any = None, ends: bool = False) -> None:
        """As decoded: lists, no tuples."""
        said = None if versions is None else {"lora_versions": [list(span) for span in versions], "of": "a connector"}
        reason = FinishReason.LENGTH if ends else None
        output = EngineCoreOutput(self.names[of], [7], finish_reason=reason, kv_transfer_params=said)
        self.processor.process_outputs([output], time.monotonic(), IterationStats())

    def seen(self) -> list[Any]:
        output = self.queue.get_nowait()
        assert output is not None
        return [(output.kv_transfer_params or {}).get("lora_versions"), output.finished]


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "make_request_output", RequestState.make_request_output)
    monkeypatch.setattr(OutputProcessor, "do_tracing", OutputProcessor.do_tracing)
    monkeypatch.setattr(vllms, "instrument_manual", vllms.instrument_manual)
    output_processor.patch()


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_an_aborted_answer_says_what_made_it(kind: RequestOutputKind) -> None:
    asked = Asked(kind)
    asked.answers()
    asked.answers(versions=MOVED)
    if kind is RequestOutputKind.DELTA:
        assert asked.seen() == [MOVED, False]
    asked.processor.abort_requests(["r"], internal=True)
    assert asked.seen() == [MOVED, True]


def test_several_choices_say_the_versions_of_all() -> None:
    asked = Asked(RequestOutputKind.FINAL_ONLY, choices=2)
    asked.answers(0, versions=MOVED, ends=True)
    asked.answers(1, versions=[(OLD, 0), (NEW, 1)], ends=True)
    assert asked.seen() == [[(OLD, 0), (NEW, 1), (NEW, 2)], True]


def test_an_answer_that_came_back_names_a_version_twice() -> None:
    asked = Asked(RequestOutputKind.FINAL_ONLY)
    asked.answers(versions=MOVED)
    asked.answers(versions=[*MOVED, (OLD, 3)], ends=True)
    assert asked.seen() == [[*MOVED, (OLD, 3)], True]


def test_what_was_not_moved_is_vllms_own() -> None:
    asked = Asked(RequestOutputKind.FINAL_ONLY)
    asked.answers(ends=True)
    output = asked.queue.get_nowait()
    assert (output.kv_transfer_params, output.finished) == (None, True)


@pytest.mark.parametrize("versions", [None, MOVED])
def test_a_span_names_adapter_and_the_versions_of_an_answer(
    process: Process, versions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process.settings = Settings(store_dir=tmp_path)
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    asked = Asked(RequestOutputKind.FINAL_ONLY, choices=2, is_traced=True)
    for state in asked.processor.request_states.values():
        state.lora_request.lora_path = str(process.resolver.store.layout.adapter(OLD))
    asked.answers(0, versions=versions, ends=True)
    asked.answers(1, ends=True)
    named = {"gen_ai.request.model": adapter(1).lora_name}
    named |= {"lora_adapter.digest": OLD if versions is None else f"{OLD},{NEW}"}
    found = [dict(span.attributes or {}) for span in kept.get_finished_spans()]
    ours = ("gen_ai.request.model", "lora_adapter.digest")
    assert [{key: value for key, value in span.items() if key in ours} for span in found] == [named] * 2
    assert [span["gen_ai.usage.prompt_tokens"] for span in found] == [2, 2]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[RequestEnded]:
    process, found = Process(Settings()), list[Any]()
    process.events = Events(found.append)
    monkeypatch.setattr(output_processor, "this_process", lambda: process)
    return found


def tokens(ended: list[RequestEnded]) -> list[tuple[str, int, int]]:
    return [(event.name, event.prompt_tokens, event.generated_tokens) for event in ended]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_an_answers_tokens_are_counted_at_its_end(kind: RequestOutputKind, ended: list[RequestEnded]) -> None:
    asked = Asked(kind)
    asked.answers()
    assert ended == []
    asked.answers(ends=True)
    assert tokens(ended) == [(adapter(1).lora_name, 2, 2)]
    assert 5.0 <= (ended[0].first_token_s or 0.0) < 60.0


def test_an_aborted_answer_counts_what_was_generated(ended: list[RequestEnded]) -> None:
    asked = Asked(RequestOutputKind.FINAL_ONLY)
    asked.answers()
    asked.processor.abort_requests(["r"], internal=True)
    assert tokens(ended) == [(adapter(1).lora_name, 2, 1)]


def limited(monkeypatch: pytest.MonkeyPatch, *choices: int) -> tuple[Rates, Rate, list[Asked]]:
    """The rates of a process in standing time, and requests of a key that has 60 tokens a minute."""
    monkeypatch.setattr(RequestState, "__init__", RequestState.__init__)
    output_processor.patch()
    rates, rate = output_processor.this_process().rates, Rate("a", tokens_per_minute=60)
    rates.clock = lambda: 1000.0
    token = principal_of_request.set(Principal("a", (), rate=rate))
    asked = [Asked(RequestOutputKind.FINAL_ONLY, choices=many) for many in choices]
    principal_of_request.reset(token)  # outputs are read for no request
    return rates, rate, asked


def test_an_answer_takes_the_tokens_of_its_key(ended: list[RequestEnded], monkeypatch: pytest.MonkeyPatch) -> None:
    rates, rate, (asked,) = limited(monkeypatch, 2)
    rates.spend(rate, 54)
    asked.answers(0, ends=True)
    assert rates.wait(rate) == ("", 0)  # 54, two of the prompt, one generated
    asked.answers(1)
    asked.answers(1, ends=True)
    assert rates.wait(rate) == ("", 0)
    asked.processor.abort_requests(["r"], internal=True)
    rates.spend(rate, 1)
    assert rates.wait(rate) == ("tokens", 1)
    Asked(RequestOutputKind.FINAL_ONLY).answers(ends=True)  # of another, without limits
    assert rates.wait(rate) == ("tokens", 1)


def test_a_request_that_never_ran_counts_nothing(ended: list[RequestEnded]) -> None:
    aborted = Asked(RequestOutputKind.FINAL_ONLY)
    aborted.processor.abort_requests(["r"], internal=True)
    refused = Asked(RequestOutputKind.FINAL_ONLY)
    refused.processor.process_outputs([EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)])
    assert ended == []


@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_early_pays_its_prompt(
    choices: int, ended: list[RequestEnded], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, rate, (aborted, refused) = limited(monkeypatch, choices, 1)
    rates.spend(rate, 57)
    refused.processor.process_outputs([EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)])
    assert rates.wait(rate) == ("", 0)
    aborted.processor.abort_requests(aborted.names, internal=True)
    assert rates.wait(rate) == ("", 0)  # 59: two of the prompt, once
    rates.spend(rate, 1)
    assert (rates.wait(rate), ended) == (("tokens", 1), [])


def test_several_choices_count_their_prompt_once(ended: list[RequestEnded]) -> None:
    asked = Asked(RequestOutputKind.FINAL_ONLY, choices=2)
    asked.answers(0)
    for choice in (1, 0):
        asked.answers(choice, ends=True)
    assert tokens(ended) == [(adapter(1).lora_name, 2, 1), (adapter(1).lora_name, 0, 2)]
    assert [event.first_token_s is None for event in ended] == [False, True]


def test_all_calls_of_an_engine_client_name_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers call `AsyncLLM` without an API server; of an API server's request, all parts have one name."""
    monkeypatch.setattr(InputProcessor, "assign_request_id", staticmethod(InputProcessor.assign_request_id))
    output_processor.patch_requests()
    named = []
    for name in ("a", "b", "of the base model"):
        one = Asked.request(name, SamplingParams(n=3))
        one.external_req_id = None
        one.lora_request = None if name == "of the base model" else one.lora_request
        InputProcessor.assign_request_id(one)
        named.append((one.trace_headers or {}).get(CLIENT))
    assert all(named[:2])
    assert (len({*named[:2]}), named[2]) == (2, None)
