"""Writes an adapter into a slot at its own rank: the adapter's rows, and zeros only over the rest of a larger rank.

vLLM zeroes the whole slot, of `max_lora_rank`, and then copies. `patch_set_lora`, called at start in every process that
may compute, replaces `set_lora` and `reset_lora` of vLLM's layer classes. So all writers (vLLM's manager in the engine
loop, ours in a background thread) and all watchers of writes (`kernels/layers.py`) call the replacements. A slot holds
the same numbers afterwards as in vLLM.

Source: vllm/lora/layers/base_linear.py and column_parallel_linear.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lora_plugins.kernels.layers import Divided, sides_of_slices

_HELD = "_lora_plugins_slots"  # the attribute of a layer with what `_held` returns
_PATCHED = "_lora_plugins_exact_slots"

Ranks = tuple[tuple[int, int], ...]  # rows of A and columns of B, for each slice


def exact_set_lora(whole: Callable[..., None]) -> Callable[..., None]:
    """Return `set_lora(index, lora_a, lora_b)` of linear layers; `whole` is vLLM's, for weights of other shapes."""

    def set_lora(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        held = _held(self)
        sides = _filling_sides(self, lora_a, lora_b)
        # A failure in the middle of the write then leaves an unknown slot, not a wrong rank.
        before = held.pop(index, None)
        if sides is None:
            whole(self, index, lora_a, lora_b)  # resets the slot first; writes to an unknown rank
            # `whole` calls the patched reset_lora, which notes an empty slot: no longer true after the write.
            held.pop(index, None)
            return
        for a, b, stack_a, stack_b in zip(*sides, self.lora_a_stacked, self.lora_b_stacked, strict=True):
            if a is not None:
                stack_a[index, 0, : a.shape[0]].copy_(a, non_blocking=True)
            if b is not None:
                stack_b[index, 0, :, : b.shape[1]].copy_(b, non_blocking=True)
        ranks = tuple(
            (0 if a is None else a.shape[0], 0 if b is None else b.shape[1]) for a, b in zip(*sides, strict=True)
        )
        if before != ranks:
            _clear(self, index, ranks, before)
        held[index] = ranks

    return set_lora


def exact_reset_lora(whole: Callable[..., None]) -> Callable[..., None]:
    """Return `reset_lora(index)` of linear layers: zeros the written ranks; `whole` is vLLM's, for an unknown slot."""

    def reset_lora(self: Any, index: int) -> None:
        held = _held(self)
        nothing = ((0, 0),) * self.n_slices
        before = held.pop(index, None)
        if before is None:
            whole(self, index)
        elif before != nothing:
            _clear(self, index, nothing, before)
        held[index] = nothing

    return reset_lora


def part_of_worker(layer: Any, lora_a: Any, lora_b: Any) -> tuple[Any, Any]:
    """Return what this worker needs of both sides, for `set_lora`, where several workers divide the layer.

    Both sides stay whole in a single worker, and where only `set_lora` can divide them: experts, and a list `lora_b`
    with tensors that cover several slices.
    """
    members = len(lora_b) if isinstance(lora_b, list) else 1
    if not hasattr(layer, _PATCHED) or layer.tp_size == 1 or members != layer.n_slices:
        return lora_a, lora_b
    sides = _filling_sides(layer, lora_a, lora_b)
    return (lora_a, lora_b) if sides is None else (Divided(sides[0]), Divided(sides[1]))


def forget(layer: Any) -> None:
    """Note that the layer's stacks may hold anything, in every slot."""
    layer.__dict__.pop(_HELD, None)


def _filling_sides(layer: Any, lora_a: Any, lora_b: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the side of each slice; None where the weights do not fill the slot's width."""
    stacks_a, stacks_b = layer.lora_a_stacked, layer.lora_b_stacked
    sides = sides_of_slices(layer, len(stacks_b), lora_a, lora_b)
    if sides is None:
        return None
    for a, b, stack_a, stack_b in zip(*sides, stacks_a, stacks_b, strict=True):
        if (a is not None and a.shape[1] != stack_a.shape[3]) or (b is not None and b.shape[0] != stack_b.shape[2]):
            return None
    return sides


def _held(layer: Any) -> dict[int, Ranks]:
    """Return by slot the ranks beyond which the slot has zeros; unknown slots are missing."""
    stacks = layer.lora_a_stacked, layer.lora_b_stacked
    known: tuple[tuple[Any, Any], dict[int, Ranks]] | None = layer.__dict__.get(_HELD)
    # A layer may have got new stacks since the ranks were noted: then nothing is known of its slots.
    if known is None or known[0][0] is not stacks[0] or known[0][1] is not stacks[1]:
        known = layer.__dict__[_HELD] = stacks, {}
    return known[1]


def _clear(layer: Any, index: int, ranks: Ranks, left: Ranks | None) -> None:
    """Zero the slot beyond `ranks`: up to `left`, the earlier adapter's ranks, or to the slot's end."""
    for i, (rank_a, rank_b) in enumerate(ranks):
        stack_a, stack_b = layer.lora_a_stacked[i], layer.lora_b_stacked[i]
        left_a, left_b = left[i] if left else (stack_a.shape[2], stack_b.shape[3])
        if left_a > rank_a:
            stack_a[index, 0, rank_a:left_a] = 0
        if left_b > rank_b:
            stack_b[index, 0, :, rank_b:left_b] = 0


def patch_set_lora() -> None:
    """Replace the methods by which vLLM's linear layers write their slots; a second call changes nothing.

    Touches:
        vllm.lora.layers.base_linear:
            BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, n_slices, set_lora(self, index, lora_a, lora_b),
                reset_lora(self, index)}
        vllm.lora.layers.column_parallel_linear:
            MergedColumnParallelLinearWithLoRA.set_lora(self, index, lora_a, lora_b)
    Why: vLLM zeroes the whole slot before every copy.
    Until: vLLM writes slots at the adapter's rank.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    # The mark is on vLLM's class: vLLM may call a plugin more than once in a process.
    if hasattr(BaseLinearLayerWithLoRA, _PATCHED):
        return
    setattr(BaseLinearLayerWithLoRA, _PATCHED, True)
    BaseLinearLayerWithLoRA.reset_lora = exact_reset_lora(BaseLinearLayerWithLoRA.reset_lora)
    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        layer.set_lora = exact_set_lora(layer.set_lora)
