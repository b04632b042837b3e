"""Adapters of embeddings on models that vLLM computes through Transformers, whose token ids have two dimensions.

There `VocabParallelEmbeddingWithLoRA.forward` (vllm/lora/layers/vocab_parallel_embedding.py, 0.30 to 0.33) takes the
first dimension, 1, for the number of tokens: every token of the batch gets the A of the first token's adapter.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.vllm_patches.wrapping import wrap


def patch() -> None:
    """Have embeddings with adapters see their tokens in one row; a second call changes nothing."""
    from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

    wrap(VocabParallelEmbeddingWithLoRA, "forward", _in_one_row)


def _in_one_row(original: Any) -> Any:
    """Give token ids of two dimensions as a single row.

    Why: vLLM takes the first dimension for the number of tokens, and so one adapter's A for the whole batch.
    Until: vLLM takes all dimensions.
    """

    def forward(self: Any, x: Any) -> Any:
        if x.ndim == 1:
            return original(self, x)
        return original(self, x.flatten()).view(*x.shape, -1)

    return forward
