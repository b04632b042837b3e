"""An error on its way from the scheduler to users of the offline engine, through vLLM's own encoding and outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lora_plugins.errors import InvalidAdapter, LoRAPluginsError, NoFreeSlot
from lora_plugins.vllm_patches import llm_engine
from tests.vllm_patches.engine_bed import Engine, adapter, make_scheduler, request, vllm_config

BROKEN = InvalidAdapter("nothing that can be read", adapter="adapter-1")
FULL = NoFreeSlot("pinned adapters in every slot", adapter="adapter-1")


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMEngine, "step", LLMEngine.step)  # put back afterwards
    llm_engine.patch()


def refused(base: Path, error: LoRAPluginsError, *, pooling: bool) -> EngineCoreOutputs:
    """What the engine core sends of a request whose adapter cannot be loaded, encoded and decoded."""
    engine = Engine(make_scheduler(vllm_config(base)))
    engine.fails[1] = error
    more = {"pooling_params": PoolingParams(task="embed")} if pooling else {}
    engine.scheduler.add_request(request("a", 1, **more))
    engine.run()
    sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[engine.end_of("a")]))
    received: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    return received


def engine_of(outputs: EngineCoreOutputs, *, pooling: bool) -> Any:
    """VLLM's offline engine, with an engine core that has these outputs for it."""
    engine = object.__new__(LLMEngine)
    engine.should_execute_dummy_batch, engine.log_stats, engine.logger_manager = False, False, None
    engine.engine_core = SimpleNamespace(get_output=lambda: outputs, abort_requests=lambda _: None)
    engine.renderer = SimpleNamespace(mm_processor_cache=None)
    engine.output_processor = OutputProcessor(None, log_stats=False)
    sampling = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    asked = EngineCoreRequest(
        request_id="a",
        external_req_id="a",
        prompt_token_ids=[3, 4],
        mm_features=None,
        sampling_params=None if pooling else sampling,
        pooling_params=PoolingParams(task="embed") if pooling else None,
        arrival_time=0.0,
        lora_request=adapter(1),
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine.output_processor.add_request(asked, None)
    return engine


@pytest.mark.parametrize("error", [BROKEN, FULL], ids=lambda error: error.code)
def test_the_stop_reason_of_a_refused_request_is_the_text(base: Path, error: LoRAPluginsError) -> None:
    (output,) = engine_of(refused(base, error, pooling=False), pooling=False).step()
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", str(error))
    assert output.outputs[0].token_ids == []


@pytest.mark.parametrize("error", [BROKEN, FULL], ids=lambda error: error.code)
def test_a_refused_pooling_request_has_an_error_and_no_data(base: Path, error: LoRAPluginsError) -> None:
    (output,) = engine_of(refused(base, error, pooling=True), pooling=True).step()
    assert output.finished
    assert output.outputs.data.numel() == 0
    if hasattr(output, "error"):  # from 0.32
        assert (output.error.code, output.error.message) == (error.code, str(error))
        assert output.error.retryable == (error is FULL)
