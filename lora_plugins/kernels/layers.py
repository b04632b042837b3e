"""What is written into the slots of vLLM's LoRA layers: slice by slice, and of which true rank.

Each layer object gets its own `set_lora` and `reset_lora`, which call those of its class, then note what was written.
So it does not matter which subclass overrides them, nor who calls: vLLM's manager in the engine loop, or ours in a
background thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lora_plugins.kernels.ranks import SlotRanks, true_ranks
from lora_plugins.ledger import Patch

_RANKS = "_lora_plugins_ranks"


class WatchedLayer(NamedTuple):
    """A layer's A's and B's, one per slice, and the ranks of what lies in them.

    A is `[slots, 1, max_rank, in]`, or `[slots, vocabulary, max_rank]` in an embedding; B `[slots, 1, out, max_rank]`.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    ranks: SlotRanks


def stacks(module: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The layer's A's and B's, one per slice; None for a layer of another kind."""
    a, b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
    if a is None or b is None or isinstance(a, list):  # FusedMoEWithLoRA: a list with an entry for every expert
        return None
    a, b = (part if isinstance(part, tuple) else (part,) for part in (a, b))
    return (a, b) if len(a) == len(b) and all(part.ndim == 4 for part in b) else None


def sides_of_slices(layer: Any, n_slices: int, lora_a: Any, lora_b: Any) -> tuple[list[Any], list[Any]] | None:
    """What `set_lora(index, lora_a, lora_b)` puts into each slice of a slot, None where a slice is not adapted.

    Expanded and divided among workers as vLLM does; None where these weights are not those of so many slices.
    """
    if n_slices > 1:
        lora_a, lora_b = (side if isinstance(side, list) else [side] for side in (lora_a, lora_b))
        if len(lora_b) != n_slices:
            expand = getattr(layer, "expand_packed_lora", None)
            if expand is None:
                return None
            lora_a, lora_b = expand(lora_a, lora_b)
    if hasattr(layer, "n_slices") and layer.tp_size > 1:  # a head's logits are gathered first
        lora_a, lora_b = layer.slice_lora_a(lora_a), layer.slice_lora_b(lora_b)
    sides_a, sides_b = (list(side) if isinstance(side, list) else [side] for side in (lora_a, lora_b))
    return (sides_a, sides_b) if len(sides_a) == len(sides_b) == n_slices else None


def watch(module: Any) -> WatchedLayer | None:
    """Note from now on what is written to the layer's slots; None for a layer of another kind (mixture of experts).

    The layer's weights must have been created. What was written before is taken to have the largest rank. A layer that
    is watched already is not wrapped again.
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
    expand = getattr(module, "expand_packed_lora", None)

    def set_and_note(index: int, lora_a: Any, lora_b: Any) -> None:
        ranks.writing(index)
        set_lora(index, lora_a, lora_b)  # calls reset_lora first, which is noted too
        ranks.written(index, true_ranks(lora_a, lora_b, ranks.largest, expand))

    def reset_and_note(index: int) -> None:
        ranks.writing(index)
        reset_lora(index)
        ranks.written(index, [0] * len(ranks.largest))

    module.set_lora, module.reset_lora = set_and_note, reset_and_note
    note_ranks(module, ranks)
    return WatchedLayer(*parts, ranks)


def note_ranks(module: Any, ranks: SlotRanks) -> None:
    """Have these be what is noted of the layer's slots."""
    setattr(module, _RANKS, ranks)


def watched_ranks(module: Any) -> SlotRanks | None:
    """What `watch` notes of a layer's slots, for who writes them past its `set_lora`; None where it is not watched."""
    known = module.__dict__.get(_RANKS)
    return known if isinstance(known, SlotRanks) else None


LEDGER = (
    Patch(
        """
        vllm.lora.layers.base:
            BaseLayerWithLoRA.set_lora(self, index, lora_a, lora_b)
            BaseLayerWithLoRA.reset_lora(self, index)
            BaseLayerWithLoRA.slice_lora_a(self, lora_a)
            BaseLayerWithLoRA.slice_lora_b(self, lora_b)
        vllm.lora.layers.base_linear:
            BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, tp_size, n_slices, lora_config}
        vllm.lora.layers.column_parallel_linear:
            MergedColumnParallelLinearWithLoRA.expand_packed_lora(self, lora_a, lora_b)
        """,
        what="set_lora and reset_lora wrapped on each layer object, to note the rank of what is written; the rest is "
        "called and read, as vLLM's set_lora does",
        why="vLLM pads slots to max_lora_rank, and knows no true ranks afterwards",
        remove="vLLM gives punica wrappers the true rank of each slot",
    ),
)
