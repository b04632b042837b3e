"""Watches the slots of vLLM's LoRA layers: notes the true rank of each slice that a caller writes.

In a worker, a punica wrapper calls `watch` for each layer at start, and reads the ranks in every step. `stacks` and
`sides_of_slices` say how vLLM's layers divide A and B into slices (q, k and v in one layer) and among workers.

Each layer object gets its own `set_lora` and `reset_lora`. Both call the methods of the class, then note the ranks. So
neither the subclass that overrides the methods nor the caller matters: vLLM's manager in the engine loop, or our
manager in a background thread.

`set_lora` and `reset_lora` of each layer object are wrapped; the rest is called and read, as vLLM's `set_lora` does.

Touches:
    vllm.lora.layers.base:
        BaseLayerWithLoRA{set_lora(self, index, lora_a, lora_b), reset_lora(self, index), slice_lora_a(self, lora_a),
            slice_lora_b(self, lora_b)}
    vllm.lora.layers.base_linear:
        BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, tp_size, n_slices, lora_config}
    vllm.lora.layers.column_parallel_linear: MergedColumnParallelLinearWithLoRA.expand_packed_lora(self, lora_a, lora_b)
Why: vLLM pads slots to max_lora_rank, and knows no true ranks afterwards.
Until: vLLM gives punica wrappers the true rank of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.kernels.slot_ranks import SlotRanks

_RANKS = "_lora_plugins_ranks"


class Divided(list[Any]):
    """One side of every slice, for `set_lora`: already the part of this worker, where several divide a layer."""


class WatchedLayer(NamedTuple):
    """A layer's A's and B's, a pair for each slice, and the true ranks in the slots.

    A is `[slots, 1, max_rank, in]`, or `[slots, vocabulary, max_rank]` in an embedding; B is `[slots, 1, out,
    max_rank]`.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    ranks: SlotRanks


def stacks(module: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the layer's A's and B's, a pair for each slice; None for a layer of another kind."""
    a, b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
    if a is None or b is None or isinstance(a, list):  # FusedMoEWithLoRA: a list with an entry for every expert
        return None
    a, b = (part if isinstance(part, tuple) else (part,) for part in (a, b))
    return (a, b) if len(a) == len(b) and all(part.ndim == 4 for part in b) else None


def option_without_vectors(lora_config: Any) -> str:
    """Return the option with which our layers compute no vectors; empty where they compute them.

    Touches:
        vllm.config.lora: LoRAConfig{fully_sharded_loras}
        vllm.envs: VLLM_LORA_ENABLE_DUAL_STREAM
    Why: an adapter with vectors is refused where a layer would leave them out, and no memory is taken for vectors.
    Until: vLLM serves DoRA (vllm-project/vllm#47395).
    """
    from vllm import envs

    if lora_config.fully_sharded_loras:
        return "--fully-sharded-loras"
    return "VLLM_LORA_ENABLE_DUAL_STREAM" if getattr(envs, "VLLM_LORA_ENABLE_DUAL_STREAM", False) else ""


def sides_of_slices(layer: Any, n_slices: int, lora_a: Any, lora_b: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the sides that `set_lora(index, lora_a, lora_b)` puts into each slice, None where a slice is not adapted.

    The sides are expanded and divided among workers as vLLM does. The answer is None where the weights have another
    number of slices.
    """
    if isinstance(lora_b, Divided):
        return lora_a, lora_b
    if n_slices > 1:
        # vLLM 0.30 to 0.33: a packed layer takes a list with a member for each slice, or fewer members that
        # `expand_packed_lora` splits (column_parallel_linear.py).
        lora_a, lora_b = (side if isinstance(side, list) else [side] for side in (lora_a, lora_b))
        if len(lora_b) != n_slices:
            expand = getattr(layer, "expand_packed_lora", None)
            if expand is None:
                return None
            lora_a, lora_b = expand(lora_a, lora_b)
    # Only linear layers are divided: a head gathers its logits first.
    if hasattr(layer, "n_slices") and layer.tp_size > 1:
        lora_a, lora_b = layer.slice_lora_a(lora_a), layer.slice_lora_b(lora_b)
    sides_a, sides_b = (list(side) if isinstance(side, list) else [side] for side in (lora_a, lora_b))
    return (sides_a, sides_b) if len(sides_a) == len(sides_b) == n_slices else None


def watch(module: Any) -> WatchedLayer | None:
    """Note all later writes to the layer's slots; return None for a layer of another kind (mixture of experts).

    The layer's weights must have been created. Earlier content counts as of the largest rank. A second call on the same
    layer wraps nothing again.
    """
    parts = stacks(module)
    if parts is None:
        return None
    known = watched_ranks(module)
    if known is not None:
        return WatchedLayer(*parts, known)
    _, b = parts
    ranks = SlotRanks(b[0].shape[0], [int(b_i.shape[3]) for b_i in b])
    set_lora, reset_lora = module.set_lora, module.reset_lora

    def set_and_note(index: int, lora_a: Any, lora_b: Any) -> None:
        # Before the write the slot counts as full: a failure within `set_lora` then leaves a rank that is safe for any
        # content.
        ranks.writing(index)
        set_lora(index, lora_a, lora_b)  # calls reset_lora first, and the wrapper notes the reset too
        sides = sides_of_slices(module, len(b), lora_a, lora_b)
        # Weights of another number of slices: the largest ranks are right for any content.
        ranks.written(index, ranks.largest if sides is None else _ranks_of(sides[1], ranks.largest))

    def reset_and_note(index: int) -> None:
        ranks.writing(index)
        reset_lora(index)
        ranks.written(index, [0] * len(ranks.largest))

    module.set_lora, module.reset_lora = set_and_note, reset_and_note
    note_ranks(module, ranks)
    return WatchedLayer(*parts, ranks)


def _ranks_of(sides_b: Sequence[Any], largest: Sequence[int]) -> list[int]:
    """Return the rank of each slice's B `[out, rank]`, up to the slot's; 0 where a slice is not adapted."""
    return [0 if b is None else min(int(b.shape[1]), most) for b, most in zip(sides_b, largest, strict=True)]


def refuse_more_rows(rows: int, mapped: int) -> None:
    """Refuse to compute an adapted layer of more rows than vLLM has named adapters for, but for a padded batch.

    While vLLM records a graph of whole batches, its context has no size of the batch, and nobody reads the results.

    Raises:
        IncompatibleAdapter: rows of unknown requests, such as an encoder's.

    Touches:
        vllm.forward_context: ForwardContext{batch_descriptor} BatchDescriptor{num_tokens}
    Why: vLLM pads batches for graphs, and calls some layers with other rows than tokens.
    Until: vLLM names the adapter of each row of every layer.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    is_in_step = is_forward_context_available()
    batch = get_forward_context().batch_descriptor if is_in_step else None
    if rows > mapped and (not is_in_step or (batch is not None and rows > batch.num_tokens)):
        raise IncompatibleAdapter(
            f"a layer of {rows} rows, of which vLLM names the adapters of {mapped}",
            expected="an adapter's name for each row",
            remedy="serve adapters without modules of encoders, towers and connectors, and report the model's class",
        )


def note_ranks(module: Any, ranks: SlotRanks) -> None:
    setattr(module, _RANKS, ranks)


def watched_ranks(module: Any) -> SlotRanks | None:
    """Return the noted ranks of a watched layer, for writers that bypass `set_lora`; None for an unwatched layer."""
    # From the object's own `__dict__`: torch's `Module` answers getattr from parameters and submodules too.
    known = module.__dict__.get(_RANKS)
    return known if isinstance(known, SlotRanks) else None
