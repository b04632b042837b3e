"""Each row of a batch is computed with the adapter of its request, where vLLM mistakes the number of rows.

Of a model that vLLM computes through Transformers, token ids have two dimensions. There
`VocabParallelEmbeddingWithLoRA.forward` (vllm/lora/layers/vocab_parallel_embedding.py, 0.30 to 0.33) takes the first
dimension, 1, for the number of tokens: every token of the batch gets the A of the first token's adapter.

In Model Runner V2 a request with drafts has a row of logits for each draft and one more. `LoraState.make_lora_inputs`
(vllm/v1/worker/gpu/lora_utils.py, 0.30 to 0.33) names one adapter for each request: with speculation the adapters of
`lm_head` meet other requests' rows on GPUs, and vLLM's CPU kernels raise. vLLM's first runner repeats them by row.

The adapters of requests are repeated for each row of logits that `prepare_inputs` has counted.

Touches:
    vllm.v1.worker.gpu.lora_utils:
        LoraState{__init__(self, max_num_reqs), make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens)}
    vllm.v1.worker.gpu.model_runner:
        GPUModelRunner.prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, ...)
    vllm.v1.worker.gpu.input_batch: InputBatch{cu_num_logits_np}
Why: with speculation a request has several rows, and adapters of lm_head would meet other requests' rows.
Until: make_lora_inputs of Model Runner V2 takes the rows of each request.
"""

from __future__ import annotations

import sys
from typing import Any

from lora_plugins.vllm_patches.wrapping import wrap

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ROWS = "_lora_plugins_rows"  # an attribute of LoraState: how many rows of logits each request of the batch has


def patch() -> None:
    """Have embeddings and runners of this process count rows by request; a second call changes nothing."""
    from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
    from vllm.v1.worker.gpu.lora_utils import LoraState

    wrap(VocabParallelEmbeddingWithLoRA, "forward", _in_one_row)
    wrap(LoraState, "__init__", _beside_its_runner)
    wrap(LoraState, "make_lora_inputs", _by_row)


def _beside_its_runner(original: Any) -> Any:
    """A runner makes its LoraState: only processes with a runner have imported the runner's module."""

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runner: Any = sys.modules.get(_RUNNER)
        if runner is not None:
            wrap(runner.GPUModelRunner, "prepare_inputs", _counting_rows)

    return initialise


def _counting_rows(original: Any) -> Any:
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        setattr(self.lora_state, _ROWS, batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1])
        return batch

    return prepare_inputs


def _by_row(original: Any) -> Any:
    def make_lora_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_requests, *others = original(self, *args, **kwargs)
        rows = vars(self).pop(_ROWS, None)
        # Without drafts each request has one row. A vLLM that repeats adapters itself names more than one a request.
        if rows is None or (rows == 1).all() or len(of_requests) != len(rows):
            return of_requests, *others
        by_row = [one for one, count in zip(of_requests, rows.tolist(), strict=True) for _ in range(count)]
        return tuple(by_row), *others

    return make_lora_inputs


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
