"""Weights of heads, embeddings and fused modules that do not fit are refused before the engine loop meets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter
from lora_plugins.scheduler.messages import Activated, Failed
from lora_plugins.worker import adapter_checks
from tests.worker import small_model
from tests.worker.small_model import WIDTH, Make, activate, bring, ended, make_adapter, serve, slots_of, step

WORDS, FUSED = 64, (16, 8, 8)
BAD = 9


@pytest.fixture
def manager(make_manager: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One slot, in which whoever comes second takes the place of the first."""
    monkeypatch.setattr(small_model, "small_model", model_with_words)
    return make_manager(slots=1)


def model_with_words(small: Callable[[], Any] = small_model.small_model) -> Any:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model = small()
    type(model).embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    model.embed_tokens = VocabParallelEmbedding(WORDS, WIDTH)
    model.lm_head, model.logits_processor = ParallelLMHead(WORDS, WIDTH), LogitsProcessor(WORDS)
    model.fused = MergedColumnParallelLinear(WIDTH, list(FUSED), bias=False)
    return model


def linear(name: str, rank: int, wide: int, high: int) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{name}"
    return {f"{name}.lora_A.weight": torch.ones(rank, wide), f"{name}.lora_B.weight": torch.ones(high, rank)}


def embedding(rank: int, words: int, wide: int) -> dict[str, torch.Tensor]:
    name = "base_model.model.embed_tokens.lora_embedding"
    return {f"{name}_A": torch.ones(rank, words), f"{name}_B": torch.ones(wide, rank)}


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (linear("lm_head", 4, WIDTH, WORDS - 1), True),
        (linear("lm_head", 4, WIDTH, WORDS + 1), False),
        (linear("lm_head", 9, WIDTH, WORDS), False),
        (embedding(4, WORDS, WIDTH + 1), False),
        (embedding(9, WORDS, WIDTH), False),
        (linear("fused", 9, WIDTH, sum(FUSED)), False),
        (linear("fused", 4, WIDTH, FUSED[0]), False),
    ],
    ids=[
        "head of fewer words", "head of more words", "head of a larger rank", "wide embedding",
        "embedding of a larger rank", "fused of a larger rank", "fused, its first slice only",
    ],
)  # fmt: skip
def test_what_does_not_fit_fails_in_the_background(
    manager: Any, tmp_path: Path, change: dict[str, torch.Tensor], fits: bool
) -> None:
    good, adapter = make_adapter(tmp_path / "good", 1), make_adapter(tmp_path / "a", BAD, change=change)
    serve(manager, good, 0)
    report = bring(manager, adapter)
    assert isinstance(report, Failed) is not fits, report
    if isinstance(report, Failed):
        assert isinstance(report.error, IncompatibleAdapter | InvalidAdapter)
        step(manager, good)
    else:
        assert isinstance(ended(manager, activate(manager, adapter, 0)), Activated)
        step(manager, adapter)
        assert slots_of(manager) == [BAD]


def on_two_devices(layer: Any) -> Any:
    """The layer as the first of two devices has it."""
    layer.tp_size, layer.tp_rank = 2, 0
    layer.output_slices = tuple(size // 2 for size in FUSED)
    layer.output_ids = (0,) * len(FUSED)
    layer.lora_b_stacked = tuple(b[:, :, : size // 2] for b, size in zip(layer.lora_b_stacked, FUSED, strict=True))
    return layer


def test_fused_weights_are_split_before_they_are_sharded(manager: Any) -> None:
    layer = on_two_devices(manager._adapter_manager.modules["fused"])
    fused = SimpleNamespace(lora_a=torch.ones(4, WIDTH), lora_b=torch.ones(sum(FUSED), 4))
    adapter_checks.check_slot("fused", layer, fused)
    groups = SimpleNamespace(
        lora_a=[torch.ones(4, WIDTH), torch.ones(4, WIDTH)],
        lora_b=[torch.ones(FUSED[0], 4), torch.ones(FUSED[1] + FUSED[2], 4)],
    )
    adapter_checks.check_slot("fused", layer, groups)
    groups.lora_a[1] = torch.ones(4, WIDTH + 1)
    with pytest.raises(IncompatibleAdapter, match=r"\(4, 17\)"):
        adapter_checks.check_slot("fused", layer, groups)
