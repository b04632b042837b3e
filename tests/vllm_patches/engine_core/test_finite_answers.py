"""Requests whose logits are NaN over vLLM's real schedulers: they end alone, and their version is served twice."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from lora_plugins.vllm_patches.engine_core import finite_answers
from lora_plugins.vllm_patches.engine_core.scheduler import with_admission
from lora_plugins.vllm_patches.message_fields import error_in, error_in_tensor
from tests.vllm_patches.engine_bed import BLOCK, Engine, Make, adapter


def with_nan(engine: Engine, *names: str) -> Engine:
    """From now on the logits of these requests are NaN, or what is pooled of them."""
    run = engine._run

    def spoilt(output: Any) -> Any:
        made = run(output)
        made.num_nans_in_logits = {name: 100 * (name in names) for name in made.req_ids}
        pooling = [engine.scheduler.requests[name].pooling_params is not None for name in made.req_ids]
        if any(pooling):
            made.sampled_token_ids = []
            values = [float("nan") if name in names else 1.0 for name in made.req_ids]
            made.pooler_output = [torch.tensor([value, 1.0]) for value in values]
        return made

    engine._run = spoilt  # type: ignore[method-assign]
    return engine


def beside_others(engine: Engine) -> None:
    for name, lora in (("bad", 1), ("good", 2), ("of-base", None)):
        engine.add(name, lora, tokens=5)
    engine.run()


def test_a_request_without_numbers_ends_alone(make_engine: Make) -> None:
    engine = with_nan(make_engine(max_loras=2), "bad", "of-base")
    beside_others(engine)
    end = engine.end_of("bad")
    assert (end.finish_reason, engine.tokens_of("bad")) == (FinishReason.ERROR, [])
    error = error_in(end.stop_reason)
    assert error is not None
    assert (error.code, error.adapter) == ("L005", "adapter-1")
    assert [len(engine.tokens_of(name)) for name in ("good", "of-base")] == [5, 5]
    assert not engine.scheduler.requests
    assert not engine.scheduler.planner.state.of_request
    assert engine.gone.count("bad") == 1


def ending_nan(kind: type) -> type:
    """A scheduler class of vLLM's as vllm-project/vllm#50283 changes it: it ends requests with NaN itself."""

    def update_from_output(self: Any, scheduled: Any, computed: Any) -> Any:
        outputs = kind.update_from_output(self, scheduled, computed)  # type: ignore[attr-defined]
        bad = [name for name, count in (computed.num_nans_in_logits or {}).items() if count and name in self.requests]
        for name in bad:
            index = self.requests[name].client_index
            self.finish_requests(name, RequestStatus.FINISHED_ERROR)
            ended = EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=FinishReason.ERROR)
            outputs.setdefault(index, EngineCoreOutputs()).outputs.append(ended)
        return outputs

    return type("EndsNaN", (kind,), {"update_from_output": update_from_output})


def test_where_vllm_ends_them_each_is_answered_once(make_engine: Make) -> None:
    kind = with_admission(ending_nan(type(make_engine(is_stock=True).scheduler)))
    engine = with_nan(make_engine(max_loras=2, kind=kind), "bad", "of-base")
    beside_others(engine)
    ends = sorted((one.request_id, str(one.finish_reason)) for one in engine.outputs if one.finish_reason is not None)
    assert ends == [("bad", "error"), ("good", "length"), ("of-base", "error")]
    assert error_in(engine.end_of("bad").stop_reason) is not None, "with our error"
    assert not engine.scheduler.requests


def test_an_answer_ends_in_the_middle(make_engine: Make) -> None:
    engine = make_engine()
    engine.add("bad", 1, tokens=9)
    while len(engine.tokens_of("bad")) < 3:
        engine.step()
    with_nan(engine, "bad").run()
    assert len(engine.tokens_of("bad")) < 9
    assert error_in(engine.end_of("bad").stop_reason) is not None


def test_a_pooled_result_without_numbers_is_an_error(make_engine: Make) -> None:
    engine = with_nan(make_engine(max_loras=2), "bad")
    for name, lora in (("bad", 1), ("good", 2)):
        engine.add(name, lora, pooling_params=PoolingParams(task="embed"))
    engine.run()
    assert error_in_tensor(engine.end_of("bad").pooling_output) is not None
    assert engine.end_of("good").pooling_output.tolist() == [1.0, 1.0]


def test_pooled_outputs_of_the_base_model_are_not_looked_at(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are megabytes each, and the look is in the engine's loop."""
    looked_at = []
    monkeypatch.setattr(finite_answers, "_has_nan", lambda pooled: looked_at.append(pooled.tolist()))
    engine = make_engine(max_loras=2)
    for name, lora in (("good", 1), ("of-base", None)):
        engine.add(name, lora, pooling_params=PoolingParams(task="embed"))
    with_nan(engine, "of-base").run()
    assert looked_at == [[1.0, 1.0]]
    assert engine.end_of("of-base").pooling_output.isnan().any(), "as vLLM computed it"


def spoilt_twice(make_engine: Make) -> Engine:
    """Two answers of the first generation of adapter 1 were NaN, and its client asks for another."""
    engine = make_engine(max_loras=2)
    with_nan(engine, "first", "second", "fourth", "fifth")
    answers(engine, "first", "second", "third")
    assert ended_well(engine) == set()
    assert "2 answers" in error_of(engine, "third")
    return engine


def error_of(engine: Engine, name: str) -> str:
    error = error_in(engine.end_of(name).stop_reason)
    return "" if error is None else str(error)


def ended_well(engine: Engine) -> set[str]:
    return {one.request_id for one in engine.outputs if one.finish_reason is FinishReason.LENGTH}


def load_again(engine: Engine) -> None:
    """The same path, with other bytes."""
    planner = engine.scheduler.planner
    future = planner.load(engine.scheduler.specs.of(adapter(1)), time.monotonic(), is_other=True)
    engine.run()
    assert future.result(timeout=0) is None


def test_the_next_generation_of_a_path_is_judged_by_itself(make_engine: Make) -> None:
    engine = spoilt_twice(make_engine)
    load_again(engine)
    answers(engine, "corrected", "fourth", "fifth", "sixth")
    assert ended_well(engine) == {"corrected"}
    assert all("an answer with" in error_of(engine, name) for name in ("fourth", "fifth"))
    assert "2 answers" in error_of(engine, "sixth")


def answers(engine: Engine, *names: str) -> None:
    for name in names:
        engine.answer(name, 1)


def test_numbers_of_a_client_quarantine_no_adapter(make_engine: Make) -> None:
    engine = with_nan(make_engine(), "own-1", "own-2")
    run = engine._run

    def bringing(output: Any) -> Any:
        for name in {"own-1", "own-2"} & set(engine.scheduler.requests):
            engine.scheduler.requests[name].prompt_embeds = torch.ones(4, 8)
        return run(output)

    engine._run = bringing  # type: ignore[method-assign]
    answers(engine, "own-1", "own-2", "healthy")
    assert "an answer with" in error_of(engine, "own-2")
    assert ended_well(engine) == {"healthy"}


def test_a_finite_answer_in_between_shows_a_version_that_computes(make_engine: Make) -> None:
    engine = with_nan(make_engine(), "first", "second")
    answers(engine, "first", "between", "second", "third")
    assert ended_well(engine) == {"between", "third"}


def test_a_quarantine_ends_by_itself_until_the_next_nan(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_nan(make_engine(), "first", "second", "fourth")
    answers(engine, "first", "second", "third")
    assert "or ask again in 300 s" in error_of(engine, "third")
    with monkeypatch.context() as passed:
        passed.setattr(finite_answers, "QUARANTINE_S", 0.0)
        answers(engine, "fourth")
    assert "an answer with" in error_of(engine, "fourth"), "computed again"
    answers(engine, "fifth")
    assert "3 answers in a row" in error_of(engine, "fifth")
    monkeypatch.setattr(finite_answers, "QUARANTINE_S", 0.0)
    answers(engine, "sixth", "seventh")
    assert ended_well(engine) == {"sixth", "seventh"}


def test_requests_for_a_quarantined_version_are_counted(make_engine: Make) -> None:
    engine = with_nan(make_engine(), "first", "second")
    answers(engine, "first", "second", "third", "fourth")
    assert "answers in a row" in error_of(engine, "fourth")
    assert engine.scheduler.planner.stats.refused == {"L005": 2}


def test_blocks_of_what_has_ended_leave_the_prefix_cache(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    evicted: list[set[int]] = []
    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "evict_blocks", evicted.append)
    engine.add("bad", 1, prompt=2 * BLOCK + 1)
    with_nan(engine, "bad").run()
    (blocks,) = evicted
    assert len(blocks) == 3
