"""Logits of a prompt's rows are those of the adapter of each row's own request, with our kernels and with vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.worker.prompt_rows import PromptRows, rows_of_batch
from tests.worker import small_model
from tests.worker.small_model import WIDTH, Adapter, Make, make_adapter, serve, step
from tests.worker.test_fits import WORDS, model_with_words

HEAD = "base_model.model.lm_head.lora_{}.weight"


@pytest.fixture
def manager(make_manager: Make, kernels: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def with_logits() -> Any:
        made = model_with_words()
        made.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(2))
        made.lm_head.cpu_linear = torch.nn.functional.linear  # as vLLM sets once weights are loaded
        type(made).compute_logits = lambda self, hidden: self.logits_processor(self.lm_head, 2 * hidden)
        return made

    monkeypatch.setattr(small_model, "small_model", with_logits)
    return make_manager()


def adapter_with_head(directory: Path, number: int) -> tuple[Adapter, torch.Tensor]:
    """An adapter of a rank of its own, and what its head adds to the base model's, `[words, features]`."""
    a, b = torch.randn(4, WIDTH), torch.randn(WORDS, 4)
    made = make_adapter(directory / str(number), number, change={HEAD.format("A"): a, HEAD.format("B"): b})
    return made, 2 * b @ a


def logits_of_prompts(manager: Any, whole: torch.Tensor, *spans: tuple[int, int]) -> list[torch.Tensor]:
    token = rows_of_batch.set(whole)
    try:
        return [manager._adapter_manager.model.compute_logits(whole[first:end]) for first, end in spans]
    finally:
        rows_of_batch.reset(token)


def test_heads_meet_the_rows_of_their_own_prompts(manager: Any, tmp_path: Path) -> None:
    """Of a batch, and of a prompt's part that begins within the batch; rows to sample are as before."""
    from vllm.lora.layers.utils import LoRAMapping, LoRAMappingType

    (one, of_one), (other, of_other) = (adapter_with_head(tmp_path, number) for number in (1, 2))
    serve(manager, one, 0)
    serve(manager, other, 1)
    owners = (one, one, other, other, other)
    heads = [of_one, of_one, of_other, of_other, of_other]
    ids = tuple(owner.adapter_id for owner in owners)
    manager.set_active_adapters({one.request(), other.request()}, LoRAMapping(ids, (ids[1], ids[4]), is_prefill=True))
    hidden = torch.randn(6, WIDTH)[1:]  # within a larger buffer, as in graphs
    base = manager._adapter_manager.model.lm_head.weight[:WORDS]
    wanted = torch.stack([2 * (base + head) @ row for row, head in zip(hidden, heads, strict=True)])
    spans = ((0, 5), (0, 2), (1, 4), (3, 4))
    for found, (first, end) in zip(logits_of_prompts(manager, hidden, *spans), spans, strict=True):
        assert torch.allclose(found, wanted[first:end], atol=1e-4)
    # The rows of an encoder come between.
    manager._adapter_manager.prompt_rows.begin_batch(LoRAMapping((0,), (0,), type=LoRAMappingType.TOWER))
    (found,) = logits_of_prompts(manager, hidden, (1, 4))
    assert torch.allclose(found, wanted[1:4], atol=1e-4)
    sampled = manager._adapter_manager.model.compute_logits(hidden[[1, 4]])
    assert torch.allclose(sampled, wanted[[1, 4]], atol=1e-4)


def test_prompts_beside_requests_without_adapters_raise_nothing(manager: Any) -> None:
    step(manager)
    (found,) = logits_of_prompts(manager, torch.ones(3, WIDTH), (0, 3))
    base = manager._adapter_manager.model.lm_head.weight[:WORDS]
    assert torch.allclose(found, 2 * torch.ones(3, WIDTH) @ base.T, atol=1e-4)


def test_models_for_pooling_have_no_rows_of_prompts() -> None:
    class Manager:
        model = object()

    PromptRows(Manager())
    assert not hasattr(Manager.model, "compute_logits")
