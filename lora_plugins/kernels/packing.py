"""Panels made of an adapter's own tensors when it is loaded, for slots to point at: activating it copies nothing.

The way through vLLM's slot (`set_lora`, and then panels of what is in it) copies an adapter twice when it is activated.
Here `Packer.pack` copies it once, in a background thread, and `Packer.place` points a slot at that. What is in
the slot's stacks then counts for nothing, until `set_lora` or `reset_lora` of that slot takes over again.

A layer has a packer where the compiled product computes everything that is asked of its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins.kernels import crossover
from lora_plugins.kernels.compiled.panels import SlotPanels, fill, size
from lora_plugins.kernels.layers import sides_of_slices

_PACKER = "_lora_plugins_packer"
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedModule:
    """One module of one adapter in panels; it owns their memory, or holds on to the block that it was given.

    Attributes:
        ranks: of each slice.
        shape: of the layers that it can be placed in: columns of `x`, of each slice of `y`, and the dtype.
        flat: all panels. slices: where each slice lies in them, as `lora.c` wants it.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, tuple[int, ...], Any]
    flat: Any
    slices: Any

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)


class Packer:
    """Packs weights for one layer, and points its slots at them.

    Args:
        module: vLLM's layer.
        panels: those of its slots.
    """

    def __init__(self, module: Any, panels: SlotPanels) -> None:
        self._module, self.panels = module, panels
        a, b = panels.a, panels.b
        self.shape = int(a[0].shape[3]), tuple(int(b_i.shape[2]) for b_i in b), a[0].dtype

    def size_bytes(self, lora_a: Any, lora_b: Any) -> int:
        """Bytes that `pack` needs for these weights, up to a multiple of 64; 0 where it returns None."""
        sides = self._sides(lora_a, lora_b)
        return 0 if sides is None else -(-self._size(_ranks(sides)) * self.shape[2].itemsize // ALIGNMENT) * ALIGNMENT

    def pack(
        self, lora_a: Any, lora_b: Any, scaling: float | Sequence[float | None] = 1.0, memory: Any = None
    ) -> PackedModule | None:
        """Copy what `set_lora` takes into panels, B times `scaling`; None where only the slot's stacks can hold it.

        Callable from any thread: no slot is read or written. Nothing of the given tensors is referenced afterwards.

        Args:
            lora_a: as for vLLM's `set_lora`, not divided among workers, of any floating dtype and strides.
            lora_b: likewise; both are None where the adapter does not adapt this layer.
            scaling: multiplied in the dtype of B, as vLLM's `LoRALayerWeights.optimize` does; perhaps one for each
                member of the list `lora_b`.
            memory: uint8, `size_bytes` or more, at a multiple of 64: to pack into instead of memory of its own.

        Raises:
            ValueError: `memory` is not of that kind.
        """
        inn, widths, dtype = self.shape
        if not isinstance(scaling, float | int):
            lora_b = [b if b is None or by is None else _scaled(b, by) for b, by in zip(lora_b, scaling, strict=True)]
            scaling = 1.0
        sides = self._sides(lora_a, lora_b)
        if sides is None:
            return None
        ranks = _ranks(sides)
        n = self._size(ranks)
        flat = torch.empty(n, dtype=dtype) if memory is None else _part_of(memory, n * dtype.itemsize).view(dtype)
        prepared: dict[int, Any] = {}  # an A that slices share is converted once
        ready = []
        for a, b in sides:
            if id(a) not in prepared:
                prepared[id(a)] = _in_rows(a, dtype)
            ready.append((prepared[id(a)], _in_rows(_scaled(b, scaling), dtype)))
        return PackedModule(ranks, self.shape, flat, fill(self.panels.product, flat, inn, widths, ready))

    def place(self, index: int, packed: PackedModule | None) -> None:
        """Point slot `index` at these panels, or at nothing: no copy. Called where no product is running.

        Raises:
            ValueError: it was packed for a layer of another shape.
        """
        if packed is None:
            self.panels.place(index, (0,) * len(self.shape[1]), None, None)
            return
        if packed.shape != self.shape:
            raise ValueError(f"weights packed for {packed.shape}, to be placed in a layer of {self.shape}")
        self.panels.place(index, packed.ranks, packed.flat, packed.slices)

    def _sides(self, lora_a: Any, lora_b: Any) -> list[tuple[Any, Any]] | None:
        """A and B of each slice, of rank 0 where it is not adapted; None where they are no pairs that fill the slot."""
        panels, (inn, widths, _) = self.panels, self.shape
        if lora_a is None and lora_b is None:
            lora_a = lora_b = [None] * len(widths)
        found = sides_of_slices(self._module, panels.a, panels.b, lora_a, lora_b)
        if found is None:
            return None
        sides: list[tuple[Any, Any]] = []
        for a, b, width, most in zip(*found, widths, panels.ranks.largest, strict=True):
            if a is None and b is None:
                sides.append((torch.empty(0, inn), torch.empty(width, 0)))
            elif a is None or b is None or not a.shape[0] == b.shape[1] <= most:
                return None
            else:
                sides.append((a, b))
        return sides

    def _size(self, ranks: tuple[int, ...]) -> int:
        inn, widths, _ = self.shape
        return size(self.panels.product, inn, widths, ranks)


def give_packer(module: Any, panels: SlotPanels | None) -> None:
    """Give this layer a packer if every product with its slots is one with panels, else none."""
    fits = (
        panels is not None
        and crossover.torch_from_rows(str(panels.a[0].dtype).removeprefix("torch.")) is None
        # Fully sharded layers shrink and expand with the stacks.
        and not getattr(getattr(module, "lora_config", None), "fully_sharded_loras", False)
        and not hasattr(module, "set_module_to_save")  # a classification head holds more than A and B
    )
    setattr(module, _PACKER, Packer(module, panels) if fits and panels is not None else None)


def packer_of(module: Any) -> Packer | None:
    """The packer of one of vLLM's LoRA layers, where it has one."""
    packer = getattr(module, _PACKER, None)
    return packer if isinstance(packer, Packer) else None


def _ranks(sides: Sequence[tuple[Any, Any]]) -> tuple[int, ...]:
    return tuple(int(a.shape[0]) for a, _ in sides)


def _scaled(b: Any, scaling: float) -> Any:
    return b if scaling == 1 else b * scaling


def _in_rows(side: Any, dtype: Any) -> Any:
    """Of this dtype, each row contiguous."""
    side = side.to(dtype)
    return side if side.stride(1) == 1 else side.contiguous()


def _part_of(memory: Any, n_bytes: int) -> Any:
    if (
        memory.dtype is not torch.uint8
        or memory.dim() != 1
        or not memory.is_contiguous()
        or memory.numel() < n_bytes
        or memory.data_ptr() % ALIGNMENT
    ):
        raise ValueError(
            f"memory of {tuple(memory.shape)} {memory.dtype} at {memory.data_ptr():#x}: {n_bytes} bytes in uint8 at a "
            f"multiple of {ALIGNMENT} are needed"
        )
    return memory[:n_bytes]
