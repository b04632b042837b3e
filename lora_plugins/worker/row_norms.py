"""Squared norms of the rows of `W + s B A`, for DoRA: a layer is asked for its products, as W may be packed.

A worker's loading thread calls `squared_norms` or `squared_norms_of_words` for each layer with magnitudes, and waits;
the engine loop calls the layer, piece by piece (`loop_work.py`). A quantised or packed layer shows no elements of W. A
layer's answers to the identity, some columns at a time, have the norms of W's rows, once for each layer; its answers to
A have what B's rows add. An embedding and a head show the rows of their words.

Touches:
    vllm.model_executor.layers.linear: LinearBase{quant_method, params_dtype}
    vllm.model_executor.layers.vocab_parallel_embedding: VocabParallelEmbedding{quant_method, shard_indices}
    vllm.model_executor.layers.quantization.base_config: method_has_implemented_embedding(method_class)
Why: DoRA divides by the norms of the weight's rows, and vLLM has no DoRA.
Until: vLLM serves DoRA (vllm-project/vllm#47395).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

InLoop = Callable[[Iterator[None]], None]

_COLUMNS = 64  # of an identity matrix, a piece of the engine loop's time: as a prompt of so many tokens in one layer
_WORDS = 512  # of an embedding or a head, as much
_NORMS = "_lora_plugins_squared_norms"


def squared_norms(
    base: Any, stack: Any, lora_a: Sequence[Any], lora_b: Sequence[Any], widths: Sequence[int], *, in_loop: InLoop
) -> Any:
    """Return the squared norms of a linear layer's rows, float32 `[outputs]`; 1 in a slice that is not adapted.

    Args:
        base: vLLM's layer, without LoRA.
        stack: an A of the layer's slots, for device and inputs.
        lora_a: `[rank, in]` for each slice, as it is served, or None.
        lora_b: `[width, rank]` for each slice, float32, times the scaling, or None.
        widths: the outputs of each slice here.
        in_loop: see `LoopWork.run`.
    """
    answers: list[Any] = [None] * len(lora_a)

    def pieces() -> Iterator[None]:
        yield from _base_norms(base, stack)
        for number, a in enumerate(lora_a):
            if a is not None:
                answers[number] = _answer(base, stack, a.contiguous()).cpu()
                yield

    in_loop(pieces())
    squares, first = base.__dict__[_NORMS].clone(), 0
    for a, b, answer, width in zip(lora_a, lora_b, answers, widths, strict=True):
        own = slice(first, first + width)
        first += width
        if a is None or b is None:
            squares[own] = 1
        else:
            squares[own] += ((2 * answer[:, own].T + b @ (a.float() @ a.float().T)) * b).sum(1)
    return squares


def squared_norms_of_words(base: Any, stack: Any, a: Any, b: Any, in_loop: InLoop) -> Any:
    """Return the squared norms of an embedding's columns, or of a head's rows, of the words of this worker.

    `a` and `b` are float32, of the only slice; see `squared_norms`.
    """
    is_head, device = stack.ndim == 4, stack.device
    of_words, others = (b, a) if is_head else (a.T, b.T)
    own = base.shard_indices  # leaves out words that are padding, or were added for LoRA
    first, stop = own.org_vocab_start_index, own.org_vocab_end_index
    squares = torch.zeros(len(b))

    def pieces() -> Iterator[None]:
        for begin in range(first, stop, _WORDS):
            words = slice(begin, min(begin + _WORDS, stop))
            ids = torch.arange(words.start - first, words.stop - first, device=device)
            rows = base.quant_method.embedding(base, ids).detach().float()
            rows = (rows + of_words[words].to(device) @ others.to(device)).square()
            squares[words if is_head else slice(None)] += rows.sum(int(is_head)).cpu()
            yield

    in_loop(pieces())
    return squares


def shows_rows(base: Any) -> bool:
    """Whether an embedding or a head can be asked for the rows of its words."""
    from vllm.model_executor.layers.quantization.base_config import method_has_implemented_embedding

    return bool(method_has_implemented_embedding(type(base.quant_method)))


def _base_norms(base: Any, stack: Any) -> Iterator[None]:
    """Keep the squared norms of W's rows here with the layer, piece by piece; the second time there is nothing."""
    if _NORMS in base.__dict__:
        return
    inputs = int(stack.shape[-1])
    squares: Any = 0
    for begin in range(0, inputs, _COLUMNS):
        count = min(_COLUMNS, inputs - begin)
        identity = torch.zeros(count, inputs, device=stack.device)
        identity[:, begin : begin + count].fill_diagonal_(1)
        squares = squares + _answer(base, stack, identity).square().sum(0)
        yield
    # The loading thread reads numbers of the host: the loop's stream is not the thread's.
    base.__dict__[_NORMS] = squares.cpu()


def _answer(base: Any, stack: Any, x: Any) -> Any:
    """Return the layer's product with `x`, float32 on the layer's device, by its current stream."""
    with torch.no_grad():
        return base.quant_method.apply(base, x.to(stack.device, base.params_dtype), None).float()
