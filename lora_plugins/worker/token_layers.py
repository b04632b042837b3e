"""Finds the embedding and the head whose rows trained tokens can replace in a worker; or says why there are none.

`trained_tokens.py` asks once, after vLLM has wrapped the model's layers.
"""

from __future__ import annotations

from typing import Any

from lora_plugins.adapter.model_modules import TokenPlaces
from lora_plugins.adapter.trained_token_places import MAX_TOKENS

_Named = list[tuple[str, Any]]  # modules with their names


def find(manager: Any, vllm_config: Any) -> tuple[TokenPlaces, Any, Any, Any] | str:
    """Return places, embedding, the layer of logits or None, and vLLM's wrapper that has the slot of each row.

    Embedding and layer of logits are the objects that the model calls, with LoRA or without. The layer of logits is
    None in a model without a head, or for pooling. A text, a part of a sentence, says why no adapter can have trained
    tokens.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass, which has wrapped the model's layers.
        vllm_config: the engine's configuration.

    Touches:
        vllm.model_executor.layers.vocab_parallel_embedding:
            VocabParallelEmbedding{org_vocab_size, embedding_dim} ParallelLMHead{bias}
            VocabParallelEmbedding{reduce_results} # since 0.32
        vllm.model_executor.layers.logits_processor: LogitsProcessor{logits_as_input}
        vllm.lora.layers.logits_processor: LogitsProcessorWithLoRA{base_layer}
        vllm.lora.model_manager: LoRAModelManager._get_punica_wrapper(self, module_name)
        vllm.config.model: ModelConfig{enable_prompt_embeds, hf_text_config}
    Why: an adapter with trained tokens is refused where its rows would be those of other tokens, or left out.
    Until: vLLM serves `trainable_token_indices` (vllm-project/vllm#55796).
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    # In these modes a layer sees other rows than the batch's, or the embedding or the head is on another worker.
    modes = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "batch-sharded sampling": getattr(parallel, "enable_batch_sharded_sampling", False),
        "--enable-prompt-embeds": model.enable_prompt_embeds,
    }
    if mode := next((name for name, is_on in modes.items() if is_on), None):
        return f"as this server runs with {mode}"
    embeddings, heads, processors = _layers(manager.model)
    if len(embeddings) != 1 or len(processors) > 1:
        return f"as this model has {len(embeddings)} embeddings and {len(processors)} heads, not one"
    # A model for pooling has no `compute_logits`.
    (name, embedding), is_asked = embeddings[0], hasattr(manager.model, "compute_logits")
    processor = processors[0][1] if processors and is_asked else None
    layer, punica = base_of(embedding), manager._get_punica_wrapper(name)  # noqa: SLF001 - as vLLM chooses a layer's rows
    if punica is None or not getattr(layer, "reduce_results", True):
        return "as vLLM names no adapters for the rows of this model's embedding, or adds up its parts later"
    size = layer.embedding_dim
    is_unlike = any(head.bias is not None or head.embedding_dim != size for _, head in heads)
    if processor is not None and (is_unlike or base_of(processor).logits_as_input):
        return "as this model's head has a bias, another size than its embedding, or its own way to logits"
    head = (heads[0][0] if heads else "lm_head") if processor is not None else ""
    is_tied = bool(head) and bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
    places = TokenPlaces(name, head, int(layer.org_vocab_size), int(size), MAX_TOKENS, is_tied)
    return places, embedding, processor, punica


def _layers(model: Any) -> tuple[_Named, _Named, _Named]:
    """Return the model's embeddings, heads and layers of logits, each once, with their names."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        layers.setdefault(id(base_of(module)), (name, module))  # the outer one, which the model calls, comes first

    def of(*kinds: type) -> _Named:
        return [one for one in layers.values() if isinstance(base_of(one[1]), kinds)]

    heads = of(ParallelLMHead)
    return [one for one in of(VocabParallelEmbedding) if one not in heads], heads, of(LogitsProcessor)


def base_of(module: Any) -> Any:
    """Return vLLM's own layer below a layer with LoRA, or the layer itself."""
    return getattr(module, "base_layer", module)
