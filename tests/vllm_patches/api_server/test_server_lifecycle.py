"""What the admin API does to vLLM's own objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.counter import AtomicCounter
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from lora_plugins.lifecycle.leader import Leader
from lora_plugins.vllm_patches.api_server.server_lifecycle import _Server
from tests.virtual_time import runs
from tests.vllm_patches.engine_bed import adapter


class Models:
    """`OpenAIServingModels`, as far as it is asked; it can be referred to weakly."""

    lora_id_counter: Any
    base_model_paths: Any

    def __init__(self, client: Any) -> None:
        self.engine_client = client


@runs
async def test_requests_are_aborted_by_the_ids_of_the_engine_core() -> None:
    """Clients know `a`; the engine core, and so the planner, `a-1` and `a-2`."""
    aborted: list[str] = []

    async def abort_requests_async(request_ids: list[str]) -> None:
        aborted.extend(request_ids)

    client: Any = object.__new__(AsyncLLM)
    client.output_processor, client.log_requests = OutputProcessor(None, log_stats=False), False
    client.engine_core = SimpleNamespace(abort_requests_async=abort_requests_async, shutdown=lambda **_: None)
    for request_id in ("a-1", "a-2"):
        sampling = SamplingParams(detokenize=False)
        sent = EngineCoreRequest(
            request_id, [3, 4], None, sampling, None, 0.0, adapter(1), None, None, external_req_id="a"
        )
        client.output_processor.add_request(sent, None)
    models = Models(client)
    await _Server(models, Leader()).abort(["a-1"])
    assert aborted == ["a-1"]


def test_a_request_has_its_own_id() -> None:
    models = Models(None)
    models.lora_id_counter, models.base_model_paths = AtomicCounter(7), [SimpleNamespace(name="tiny")]
    requests = [_Server(models, Leader()).new_request("sql", "/store/aa") for _ in range(2)]
    assert [request.lora_int_id for request in requests] == [8, 9]
    assert {(request.lora_name, request.lora_path, request.base_model_name) for request in requests} == {
        ("sql", "/store/aa", "tiny")
    }
