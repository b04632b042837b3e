"""Each token has its own adapter of the embeddings, also where ids have two dimensions (vLLM through Transformers)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_plugins.vllm_patches.worker import adapter_rows
from tests.vllm_patches.put_back import put_back
from tests.worker import small_model
from tests.worker.small_model import WIDTH, Make, make_adapter, serve, step
from tests.worker.test_fits import WORDS, model_with_words


@pytest.fixture
def manager(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    monkeypatch.setattr(small_model, "small_model", model_with_words)
    with put_back(VocabParallelEmbeddingWithLoRA, LoRAModelManager):
        adapter_rows.patch()
        adapter_rows.patch()
        yield make_manager(slots=2)


def test_tokens_in_two_dimensions_have_their_own_adapters(manager: Any, tmp_path: Path) -> None:
    generator, name = torch.Generator().manual_seed(0), "base_model.model.embed_tokens.lora_embedding"
    adapters, deltas = [], []
    for slot in range(2):
        a, b = torch.randn(4, WORDS, generator=generator), torch.randn(WIDTH, 4, generator=generator)
        adapter = make_adapter(tmp_path / str(slot), slot + 1, modules={}, change={f"{name}_A": a, f"{name}_B": b})
        serve(manager, adapter, slot)
        adapters.append(adapter)
        deltas.append(2 * (b @ a))
    step(manager, *adapters)
    layer = manager._adapter_manager.modules["embed_tokens"]
    layer.base_layer.weight.data.normal_(generator=generator)
    ids = torch.tensor([5, 9])
    wanted = torch.stack([layer.base_layer.weight[word] + deltas[row][:, word] for row, word in enumerate(ids)])
    for shape in ((2,), (1, 2), (2, 1)):
        found = layer(ids.view(shape))
        assert found.shape == (*shape, WIDTH)
        assert torch.allclose(found.view(2, WIDTH), wanted, atol=1e-4), shape
