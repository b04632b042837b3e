"""The adapters that Model Runner V2 names for a batch: one for each row of logits, beside drafts too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState

from lora_plugins.vllm_patches.worker import adapter_rows
from testbed.forking_vllm import run_script
from testbed.server import outer_environment
from tests.vllm_patches.put_back import put_back

ADAPTERS = [7, 0, 8]  # engine ids of three requests; the second is of the base model
TOKENS = np.array([3, 5, 1])  # the second prefills


class State:
    """A LoraState as a runner has it, with the requests in the batch from last to first."""

    def __init__(self) -> None:
        self.lora_state = LoraState(max_num_reqs=4)
        for index, id_ in enumerate(ADAPTERS):
            self.lora_state.add_request(f"{index}", index, LoRARequest(f"{id_}", id_, "/none") if id_ else None)

    def inputs(self) -> Any:
        return self.lora_state.make_lora_inputs(["2", "1", "0"], np.array([2, 1, 0]), TOKENS[::-1])


@pytest.fixture
def prepare_inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`prepare_inputs(runner, rows)` as a patched runner does it: vLLM's own needs a device and a model."""
    from vllm.v1.worker.gpu import model_runner

    GPUModelRunner = model_runner.GPUModelRunner

    def prepared(self: Any, rows: list[int]) -> Any:
        return SimpleNamespace(cu_num_logits_np=np.cumsum([0, *rows]), req_ids=["2", "1", "0"])

    monkeypatch.setattr(model_runner, "set_active_mm_loras", model_runner.set_active_mm_loras)  # to be put back
    with put_back(GPUModelRunner, LoraState, LoRAModelManager):
        monkeypatch.setattr(GPUModelRunner, "prepare_inputs", prepared)
        for _ in range(2):
            adapter_rows.patch()
            State()
        yield GPUModelRunner.prepare_inputs
        monkeypatch.undo()


def test_vllm_itself_names_an_adapter_for_each_request_only() -> None:
    """Where this fails, vLLM may name one for each row, and `adapter_rows._make_lora_inputs` could go."""
    of_rows, of_tokens, active = State().inputs()
    assert of_rows == (8, 0, 7)
    assert of_tokens == (8, 0, 0, 0, 0, 0, 7, 7, 7)
    assert {request.lora_int_id for request in active} == {7, 8}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 1, 3], (8, 0, 7, 7, 7)),
        ([3, 1, 2], (8, 8, 8, 0, 7, 7)),
        ([1, 1, 1], (8, 0, 7)),
        ([0, 0, 2], (7, 7)),  # diffusion: a prefill has no logits
        ([0, 1, 2], (0, 7, 7)),  # as many rows as requests
    ],
)
def test_each_row_of_logits_has_the_adapter_of_its_request(
    prepare_inputs: Any, rows: list[int], expected: tuple[int, ...]
) -> None:
    state = State()
    unchanged = state.inputs()
    prepare_inputs(state, rows)
    assert state.inputs() == (expected, *unchanged[1:])
    assert state.inputs() == unchanged  # rows are those of one batch


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
def test_adapters_of_audios_are_named_in_the_order_of_encoding(prepare_inputs: Any, is_encoder_decoder: bool) -> None:
    """An encoder-decoder model encodes in the order of the batch, a model with a tower in the scheduler's."""
    from vllm.v1.worker.gpu import model_runner

    state = State()
    prepare_inputs(state, [1, 1, 1])
    named: list[Any] = []
    feature = SimpleNamespace(modality="audio", data=None, mm_position=SimpleNamespace(get_num_embeds=lambda: 2))
    model_runner.set_active_mm_loras(
        model=SimpleNamespace(
            config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder),
            get_mm_lora_token_counts=lambda **given: (given["num_mm_embeds"], None),
        ),
        lora_manager=SimpleNamespace(
            supports_tower_connector_lora=lambda: True, set_active_adapters=lambda _, mapping: named.append(mapping)
        ),
        encoder_cache=SimpleNamespace(mm_features={name: [feature] for name in "012"}),
        req_id_to_index={"0": 0, "1": 1, "2": 2},
        lora_state=state.lora_state,
        scheduled_encoder_inputs={"0": [0], "2": [0]},
    )
    (mapping,) = named
    assert mapping.index_mapping == ((8, 8, 7, 7) if is_encoder_decoder else (7, 7, 8, 8))


def test_a_process_without_a_runner_imports_none(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in [it for it in sys.modules if it.startswith('vllm.v1.worker.gpu')]:\n"
        "    del sys.modules[name]  # of the process that this one is forked from\n"
        "from lora_plugins.vllm_patches.worker import adapter_rows; adapter_rows.patch();"
        "from vllm.v1.worker.gpu.lora_utils import LoraState; LoraState(2);"
        "assert 'vllm.v1.worker.gpu.model_runner' not in sys.modules"
    )
    done = run_script(script, environment=outer_environment(), home=tmp_path)
    assert done.returncode == 0, done.stderr
