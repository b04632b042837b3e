"""Writing an adapter into a slot at its own rank: its rows, and zeros only where a larger one has been.

vLLM zeroes the whole slot, of `max_lora_rank`, and then copies. The replacements are in the layer classes, so all who
write a slot (vLLM's manager in the engine loop, ours in a background thread) and all who watch writes (`kernels/`)
call them. Source: vllm/lora/layers/base_linear.py and column_parallel_linear.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_plugins.kernels.layers import sides_of_slices
from lora_plugins.ledger import Patch

_SLOTS = "_lora_plugins_slots"
_PATCHED = "_lora_plugins_exact_slots"
_EXACT = "_lora_plugins_exact"  # marks our set_lora

SetLora = Callable[[Any, int, Any, Any], None]
ResetLora = Callable[[Any, int], None]
Ranks = tuple[tuple[int, int], ...]  # rows of A and columns of B, for each slice


@dataclass(slots=True)
class Slot:
    """What is known of one slot of one layer.

    Attributes:
        stacks: the layer's A's and B's that all this is about.
        held: beyond these ranks there are zeros; None where that is not known.
        views: the parts that an adapter of the ranks `viewed` fills; they take as long to make as a small copy.
    """

    stacks: tuple[Any, Any]
    held: Ranks | None = None
    viewed: Ranks | None = None
    views: tuple[tuple[Any, Any], ...] = ()


def exact_set_lora(whole: SetLora) -> SetLora:
    """`set_lora(index, lora_a, lora_b)` of linear layers; `whole` is vLLM's, for what has another shape than a slot."""

    def set_lora(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        slot = slot_of(self, index)
        sides = filling_sides(self, lora_a, lora_b)
        before, slot.held = slot.held, None  # while it is written, it may hold anything
        if sides is None:
            whole(self, index, lora_a, lora_b)  # resets the slot first; how far it writes is not known here
            slot.held = None
            return
        ranks = ranks_of(sides)
        if slot.viewed != ranks:
            slot.views, slot.viewed = _views(self, index, ranks), ranks
        for a, b, (place_a, place_b) in zip(*sides, slot.views, strict=True):
            if a is not None:
                place_a.copy_(a, non_blocking=True)
            if b is not None:
                place_b.copy_(b, non_blocking=True)
        if before != ranks:
            clear(self, index, ranks, before)
        slot.held = ranks

    setattr(set_lora, _EXACT, True)
    return set_lora


def exact_reset_lora(whole: ResetLora) -> ResetLora:
    """`reset_lora(index)` of linear layers: zeros where something is; `whole` is vLLM's, for a slot not written yet."""

    def reset_lora(self: Any, index: int) -> None:
        slot = slot_of(self, index)
        nothing = ((0, 0),) * self.n_slices
        before, slot.held = slot.held, None
        if before is None:
            whole(self, index)
        elif before != nothing:
            clear(self, index, nothing, before)
        slot.held = nothing

    return reset_lora


def filling_sides(layer: Any, lora_a: Any, lora_b: Any) -> tuple[list[Any], list[Any]] | None:
    """What goes into each slice; None where these weights do not fill the slot's width."""
    stacks_a, stacks_b = layer.lora_a_stacked, layer.lora_b_stacked
    sides = sides_of_slices(layer, len(stacks_b), lora_a, lora_b)
    if sides is None:
        return None
    for a, b, stack_a, stack_b in zip(*sides, stacks_a, stacks_b, strict=True):
        if (a is not None and a.shape[1] != stack_a.shape[3]) or (b is not None and b.shape[0] != stack_b.shape[2]):
            return None
    return sides


def forget(layer: Any) -> None:
    """Note that its stacks may hold anything, in every slot."""
    layer.__dict__.pop(_SLOTS, None)


def is_exact(layer: Any) -> bool:
    """Whether this layer's class writes slots by `exact_set_lora`."""
    return hasattr(getattr(type(layer), "set_lora", None), _EXACT)


def ranks_of(sides: tuple[list[Any], list[Any]]) -> Ranks:
    """Rows of A and columns of B of each slice, 0 where there is none."""
    return tuple((0 if a is None else a.shape[0], 0 if b is None else b.shape[1]) for a, b in zip(*sides, strict=True))


def slot_of(layer: Any, index: int) -> Slot:
    """What is known of this slot; forgotten when the layer gets other stacks."""
    known: dict[int, Slot] = layer.__dict__.setdefault(_SLOTS, {})
    slot = known.get(index)
    if slot is None or slot.stacks[0] is not layer.lora_a_stacked or slot.stacks[1] is not layer.lora_b_stacked:
        slot = known[index] = Slot((layer.lora_a_stacked, layer.lora_b_stacked))
    return slot


def _views(layer: Any, index: int, ranks: Ranks) -> tuple[tuple[Any, Any], ...]:
    return tuple(
        (stack_a[index, 0, :rank_a], stack_b[index, 0, :, :rank_b])
        for (rank_a, rank_b), stack_a, stack_b in zip(ranks, layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
    )


def clear(layer: Any, index: int, ranks: Ranks, left: Ranks | None) -> None:
    """Zero what lies beyond `ranks`: as far as `left`, where earlier adapters have been, or to the slot's end."""
    for i, (rank_a, rank_b) in enumerate(ranks):
        stack_a, stack_b = layer.lora_a_stacked[i], layer.lora_b_stacked[i]
        left_a, left_b = left[i] if left else (stack_a.shape[2], stack_b.shape[3])
        if left_a > rank_a:
            stack_a[index, 0, rank_a:left_a] = 0
        if left_b > rank_b:
            stack_b[index, 0, :, rank_b:left_b] = 0


def patch_set_lora() -> None:
    """Replace what vLLM's linear layers write their slots with; a second call changes nothing."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    if hasattr(BaseLinearLayerWithLoRA, _PATCHED):
        return
    setattr(BaseLinearLayerWithLoRA, _PATCHED, True)
    BaseLinearLayerWithLoRA.reset_lora = exact_reset_lora(BaseLinearLayerWithLoRA.reset_lora)
    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        layer.set_lora = exact_set_lora(layer.set_lora)


LEDGER = (
    Patch(
        """
        vllm.lora.layers.base_linear:
            BaseLinearLayerWithLoRA.set_lora(self, index, lora_a, lora_b)
            BaseLinearLayerWithLoRA.reset_lora(self, index)
            BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, n_slices}
        vllm.lora.layers.column_parallel_linear:
            MergedColumnParallelLinearWithLoRA.set_lora(self, index, lora_a, lora_b)
        """,
        what="replaced: writes the adapter's own rank, and zeros only where a larger one has been",
        why="vLLM zeroes the whole slot before every copy",
        remove="vLLM writes slots at the adapter's rank",
    ),
)
