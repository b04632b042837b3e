"""An error on its way from the scheduler to users of the offline engine, through vLLM's own encoding and outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, InvalidSettings, LoRAPluginsError, NoFreeSlot
from lora_plugins.process import Process
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import async_llm, llm_engine
from lora_plugins.vllm_patches.message_fields import stop_reason
from lora_plugins.vllm_patches.wrapping import around
from tests.make import adapter_files, put
from tests.vllm_patches.engine_bed import Engine, adapter, make_scheduler, vllm_config

BROKEN = InvalidAdapter("nothing that can be read", adapter="adapter-1")
FULL = NoFreeSlot("pinned adapters in every slot", adapter="adapter-1")


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step", "add_lora", "remove_lora", "add_request"):
        monkeypatch.setattr(LLMEngine, name, getattr(LLMEngine, name))  # put back afterwards
    llm_engine.patch()


def refused(base: Path, error: LoRAPluginsError, *, pooling: bool) -> EngineCoreOutputs:
    """What the engine core sends of a request whose adapter cannot be loaded, encoded and decoded."""
    engine = Engine(make_scheduler(vllm_config(base)))
    engine.fails[1] = error
    more = {"pooling_params": PoolingParams(task="embed")} if pooling else {}
    engine.answer("a", 1, **more)
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


# --- what lies at a path ---


class Offline:
    """As `LLMEngine`, with what is wrapped; `got` are the requests that reach vLLM's methods."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config="on", model_config=SimpleNamespace(model="/base"))
        self.got: list[Any] = []
        self.fails: Exception | None = None

    def _add_lora(self, lora_request: Any) -> bool:
        self.got.append(lora_request)
        if self.fails is not None:
            raise self.fails
        return True

    def _remove_lora(self, lora_id: int) -> bool:
        return True

    def _add_request(
        self, request_id: str, prompt: Any, params: Any, arrival_time: Any = None, lora_request: Any = None, **_: Any
    ) -> str:
        self.got.append(lora_request)
        return request_id

    add_lora = around(_add_lora, llm_engine._add_lora, only=async_llm.has_planner)
    remove_lora = around(_remove_lora, async_llm.remove_lora)
    add_request = around(_add_request, llm_engine._add_request, only=async_llm.has_planner)

    def ask(self, lora_request: Any, request_id: str = "0") -> str:
        self.add_request(request_id, "prompt", None, lora_request=lora_request, priority=1)
        return str(self.got[-1].lora_path)


@pytest.fixture
def at_path(tmp_path: Path, process: Process) -> LoRARequest:
    process.settings = Settings(store_dir=tmp_path / "store")
    return LoRARequest("sql", 7, str(put(tmp_path / "sql", adapter_files())))


def change(lora_request: LoRARequest, alpha: int) -> None:
    put(Path(lora_request.lora_path), adapter_files(lora_alpha=alpha))


def test_offline_requests_keep_what_their_id_stands_for(at_path: LoRARequest) -> None:
    engine = Offline()
    first = engine.ask(at_path)
    change(at_path, 9)
    assert first == engine.ask(at_path) != at_path.lora_path
    second = engine.ask(LoRARequest("sql", 7, at_path.lora_path, load_inplace=True))
    assert first != second == engine.ask(at_path)
    change(at_path, 10)
    assert engine.add_lora(at_path) is True
    third = engine.got[-1].lora_path
    assert len({first, second, third}) == 3
    assert third == engine.ask(at_path)
    change(at_path, 11)
    engine.fails = FULL
    with pytest.raises(NoFreeSlot):
        engine.add_lora(at_path)
    assert engine.ask(at_path) == third, "the load has failed"
    engine.remove_lora(7)
    assert engine.ask(at_path) not in {first, second, third}, "as vLLM reads it again"


def test_an_offline_request_that_cannot_be_copied_is_refused(at_path: LoRARequest) -> None:
    engine = Offline()
    (Path(at_path.lora_path) / CONFIG_FILE).write_text("{")
    assert not Path(engine.ask(at_path)).exists()
    assert engine.got[-1].lora_int_id != at_path.lora_int_id, "what is resident under it must not answer"
    refusal = stop_reason(AdapterNotFound("no such directory"))
    one = SimpleNamespace(stop_reason=refusal)
    output = SimpleNamespace(request_id="0", outputs=[one])
    llm_engine._explain(output)
    assert one.stop_reason.startswith("[L005]")
    with pytest.raises(InvalidAdapter):
        engine.add_lora(at_path)


def test_offline_requests_of_subclasses_stay_as_they_are(at_path: LoRARequest) -> None:
    class Tensors(LoRARequest):
        pass

    engine, request = Offline(), Tensors("sql", 8, at_path.lora_path)
    engine.ask(request)
    engine.add_lora(request)
    assert all(got is request for got in engine.got)


def test_a_store_that_cannot_be_made_is_named(at_path: LoRARequest, process: Process, tmp_path: Path) -> None:
    process.settings = Settings(store_dir=tmp_path / "sql" / CONFIG_FILE)
    with pytest.raises(InvalidSettings, match="LORA_PLUGINS_STORE_DIR"):
        Offline().add_lora(at_path)
