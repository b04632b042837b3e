"""Each row of a batch is computed with the adapter of its request, in three places where vLLM mistakes the rows.

Runs in workers: vLLM gives each row of a matrix the adapter of the row's request. In the three places below, vLLM is
wrong about the number or the order of rows.

1. Embeddings of models that vLLM computes through Transformers: token ids have two dimensions, and
`VocabParallelEmbeddingWithLoRA.forward` (vllm/lora/layers/vocab_parallel_embedding.py, 0.30 to 0.33) takes the first
dimension, 1, for the number of tokens. Every token of the batch gets the A of the first token's adapter. Here the ids
are flattened.

2. Logits in Model Runner V2 with speculation: a request has a row for each draft and one more, but
`LoraState.make_lora_inputs` (vllm/v1/worker/gpu/lora_utils.py, 0.30 to 0.33) names one adapter for each request. The
adapters of `lm_head` meet other requests' rows on GPUs, and vLLM's CPU kernels raise. Here the adapters are repeated
for each row that `prepare_inputs` has counted, as vLLM's first runner does.

3. Encoders, and the keys and values of cross-attention: their matrices have a row for each frame of an audio or patch
of an image. A punica wrapper holds the adapter of each row, for one part of the model. vLLM gives a module the wrapper
of the longest of the model's prefixes (`get_mm_mapping`) that has one. In a model without the mapping (Whisper, BAGEL,
ERNIE 4.5 VL), every module has the wrapper of the tokens' rows. So has a tower or connector whose own adapters are off,
if its prefix begins with another part's. Here such a module gets no wrapper, and so no adapter. Whisper gets the
mapping with `--enable-tower-connector-lora`, by which vLLM names the adapter of each frame.

Touches:
    vllm.v1.worker.gpu.lora_utils:
        LoraState{__init__(self, max_num_reqs), make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens)}
    vllm.v1.worker.gpu.model_runner:
        GPUModelRunner.prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, ...)
    vllm.v1.worker.gpu.input_batch: InputBatch{cu_num_logits_np, req_ids}
Why: with speculation a request has several rows, and adapters of lm_head would meet other requests' rows.
Until: make_lora_inputs of Model Runner V2 takes the rows of each request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lora_plugins.vllm_patches.wrapping import wrap

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ROWS = "_lora_plugins_rows"  # an attribute of LoraState: how many rows of logits each request of the batch has
_ORDER = "_lora_plugins_order"  # an attribute of LoraState: the requests of the batch
_WITH_TOKENS = ("attn", "q_proj", "out_proj")  # what cross-attention computes from tokens, not from encoded frames


def patch() -> None:
    """Have embeddings and runners of this process count rows by request; a second call changes nothing."""
    from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.gpu.lora_utils import LoraState

    wrap(LoRAModelManager, "_init_punica_wrapper", _init_punica_wrapper)
    wrap(LoRAModelManager, "_get_punica_wrapper", _get_punica_wrapper)
    wrap(VocabParallelEmbeddingWithLoRA, "forward", _forward)
    wrap(LoraState, "__init__", _init_lora_state)
    wrap(LoraState, "make_lora_inputs", _make_lora_inputs)


def _init_punica_wrapper(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Give a model the mapping of its parts that its class lacks, from the marks of its constructor.

    Touches:
        vllm.model_executor.models.interfaces:
            SupportsMultiModal{_language_model_names, _tower_model_names, supports_tower_connector_lora,
                get_mm_lora_token_counts(self, modality, mm_kwargs, num_mm_embeds)}
        vllm.lora.model_manager: LoRAModelManager{supports_mm, mm_mapping, punica_wrapper_mapping}
    Why: without the mapping, vLLM computes encoders with the rows of tokens.
    Until: each class of vLLM's with LoRA has get_mm_mapping.
    """
    from vllm.model_executor.models.module_mapping import MultiModelKeys

    model = self.model
    language = getattr(model, "_language_model_names", ())
    # With one name for the language model, the marks of the constructor say which module is which part.
    if len(language) == 1 and not hasattr(model, "get_mm_mapping"):
        keys = MultiModelKeys(language, list(_of_encoded_frames(model)), model._tower_model_names)  # noqa: SLF001
        model.get_mm_mapping = lambda: keys
        if keys.connector:
            # An encoder has a row for each frame, and so has the cross-attention of a decoder.
            model.supports_tower_connector_lora = True
            model.get_mm_lora_token_counts = lambda *, num_mm_embeds, **_: (num_mm_embeds, num_mm_embeds)
    original(self, *args, **kwargs)


def _of_encoded_frames(model: Any) -> Iterator[str]:
    """Yield the names of layers in cross-attention that compute keys and values, from encoded frames."""
    from vllm.model_executor.layers.attention import CrossAttention

    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "attn", None), CrossAttention):
            yield from (f"{name}.{part}" for part, _ in layer.named_children() if part not in _WITH_TOKENS)


def _get_punica_wrapper(original: Any, self: Any, module_name: str) -> Any:
    """Give a module no wrapper but that of the innermost part of the model with the module.

    Why: a tower or connector below another prefix would have that part's rows.
    Until: vLLM looks for the longest prefix among all parts.
    """
    wrapper = original(self, module_name)
    if not self.supports_mm:  # a model of text alone has one wrapper
        return wrapper
    parts = self.mm_mapping
    prefixes = (*parts.language_model, *parts.tower_model, *parts.connector)
    innermost = max((one for one in prefixes if module_name.startswith(one)), key=len, default=None)
    # None where the innermost part has no wrapper, as its adapters are off.
    return wrapper if innermost is None else self.punica_wrapper_mapping.get(innermost)


def _init_lora_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the runner that makes a LoraState: here, as an import of its module by us would load an unused runner."""
    original(self, *args, **kwargs)
    runner: Any = sys.modules.get(_RUNNER)
    if runner is not None:
        wrap(runner.GPUModelRunner, "prepare_inputs", _prepare_inputs)
        wrap(runner, "set_active_mm_loras", _set_active_mm_loras)


def _prepare_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the rows and the order of the batch's requests, for `_make_lora_inputs` and `_set_active_mm_loras`."""
    batch = original(self, *args, **kwargs)
    setattr(self.lora_state, _ROWS, batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1])
    setattr(self.lora_state, _ORDER, batch.req_ids)
    return batch


def _set_active_mm_loras(
    original: Any, *, model: Any, lora_state: Any, scheduled_encoder_inputs: Any, **others: Any
) -> None:
    """Name the adapters of audios in the order of the batch, in which an encoder-decoder model encodes them.

    Source: `EncoderDecoderModelState.prepare_inputs_embeds` in vllm/v1/worker/gpu/model_states/encoder_decoder.py.

    Touches:
        vllm.v1.worker.gpu.model_runner: set_active_mm_loras
        vllm.v1.worker.gpu.mm.lora:
            set_active_mm_loras(model, lora_manager, encoder_cache, req_id_to_index, lora_state,
                scheduled_encoder_inputs)
    Why: vLLM names them in the scheduler's order, and an audio would meet the adapter of another request.
    Until: vLLM names them in the order of encoding.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs = scheduled_encoder_inputs
        scheduled_encoder_inputs = {one: inputs[one] for one in getattr(lora_state, _ORDER) if one in inputs}
    original(model=model, lora_state=lora_state, scheduled_encoder_inputs=scheduled_encoder_inputs, **others)


def _make_lora_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat the adapter of each request for each of its rows of logits."""
    of_requests, *others = original(self, *args, **kwargs)
    rows = vars(self).pop(_ROWS, None)
    # Without drafts each request has one row. A vLLM that repeats adapters itself returns more than one a request.
    # None: `prepare_inputs` has not counted rows, as in a dummy run.
    if rows is None or (rows == 1).all() or len(of_requests) != len(rows):
        return of_requests, *others
    by_row = [one for one, count in zip(of_requests, rows.tolist(), strict=True) for _ in range(count)]
    return tuple(by_row), *others


def _forward(original: Any, self: Any, x: Any) -> Any:
    """Give token ids of two dimensions as a single row.

    Why: vLLM takes the first dimension for the number of tokens, and so one adapter's A for the whole batch.
    Until: vLLM takes all dimensions.
    """
    if x.ndim == 1:
        return original(self, x)
    return original(self, x.flatten()).view(*x.shape, -1)
