"""Panels made of an adapter's own tensors at load, for slots to point at: activation copies nothing. CPU only.

A worker gives each layer a `Packer` at start, where it may have one (`give_packer`). The loading thread packs an
adapter (`pack`); the engine loop points slots at the panels (`place`), and the compiled product reads the panels in
every step.

By way of vLLM's slot (`set_lora`, then panels of the slot's content) an activation copies an adapter twice, and every
slot takes memory of the largest rank. `Packer.pack` copies the adapter once, in a background thread, and `Packer.place`
points a slot at the copy. A layer with a packer has no stacks: views of a single zero, of the same shapes and not
writable, replace vLLM's stacks. vLLM's `set_lora` and `reset_lora` pack and place too.

A layer has a packer where the compiled product computes everything that callers ask of the layer's slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lora_plugins.errors import InvalidAdapter
from lora_plugins.kernels.compiled.library import Product
from lora_plugins.kernels.compiled.panels import Panels, SlotPanels, fill, size
from lora_plugins.kernels.dispatch import are_pointed
from lora_plugins.kernels.layers import note_ranks, sides_of_slices, stacks, watched_ranks
from lora_plugins.kernels.slot_ranks import SlotRanks

_PACKER = "_lora_plugins_packer"
# Bytes of a cache line, and of a register of AVX-512.
ALIGNMENT = 64


class Packer:
    """Packs weights for one layer, and points the layer's slots at packed weights.

    The layer's stacks are views of a single zero; `set_lora` and `reset_lora` of the layer object are ours.

    Touches:
        vllm.lora.layers.base: BaseLayerWithLoRA{set_lora(self, index, lora_a, lora_b), reset_lora(self, index)}
        vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA{lora_a_stacked, lora_b_stacked, lora_config}
        vllm.lora.layers.logits_processor: LogitsProcessorWithLoRA{lora_a_stacked, lora_b_stacked}
        vllm.lora.layers.classifier: ClassificationHeadWithLoRA # since 0.31
    Why: a slot points at an adapter's packed weights, and takes no memory.
    Until: vLLM's CPU kernels read adapters where they were loaded.

    Args:
        module: vLLM's layer.
        panels: the panels of the layer's slots.
    """

    def __init__(self, module: Any, panels: SlotPanels) -> None:
        self._module, self.panels, self.shape = module, panels, panels.shape

    def size_bytes(self, lora_a: Any, lora_b: Any) -> int:
        """Return the bytes that `pack` needs for these weights, up to a multiple of 64."""
        # A multiple of the alignment: the next piece of a block then begins aligned too.
        n_bytes = self._size(self._sides(lora_a, lora_b)) * int(self.shape.dtype.itemsize)
        return -(-n_bytes // ALIGNMENT) * ALIGNMENT

    def pack(
        self, lora_a: Any, lora_b: Any, scaling: float | Sequence[float | None] = 1.0, memory: Any = None
    ) -> Panels:
        """Copy the arguments of vLLM's `set_lora` into panels, B times `scaling`.

        Callable from any thread: `pack` neither reads nor writes a slot. The panels hold no reference to the given
        tensors.

        Args:
            lora_a: as for vLLM's `set_lora`, not divided among workers, of any floating dtype and strides.
            lora_b: likewise; both are None where the adapter does not adapt this layer.
            scaling: multiplied in the dtype of B, as vLLM's `LoRALayerWeights.optimize` does; a number, or a number for
                each member of the list `lora_b`.
            memory: uint8 `[size_bytes]` or more, at a multiple of 64: the place of the panels, in the place of new
                memory.

        Raises:
            InvalidAdapter: weights that would not fit into vLLM's slot. ValueError: `memory` has another size or
                alignment.
        """
        dtype = self.shape.dtype
        if not isinstance(scaling, float | int):
            # None for a member that the adapter does not adapt.
            lora_b = [b if b is None or by is None else _scaled(b, by) for b, by in zip(lora_b, scaling, strict=True)]
            scaling = 1.0
        sides = self._sides(lora_a, lora_b)
        n = self._size(sides)
        flat = torch.empty(n, dtype=dtype) if memory is None else _part_of(memory, n * dtype.itemsize).view(dtype)
        prepared: dict[int, Any] = {}  # slices may share an A: convert a shared A once
        ready = []
        for a, b in sides:
            if id(a) not in prepared:
                prepared[id(a)] = _in_rows(a, dtype)
            ready.append((prepared[id(a)], _in_rows(_scaled(b, scaling), dtype)))
        return fill(self.panels.product, flat, self.shape, ready)

    def place(self, index: int, packed: Panels | None) -> None:
        """Point slot `index` at `packed`, or at nothing, without a copy; callers ensure that no product is running.

        Raises:
            ValueError: `packed` was packed for a layer of another shape.
        """
        if packed is not None and packed.shape != self.shape:
            raise ValueError(f"weights packed for {packed.shape}, to be placed in a layer of {self.shape}")
        self.panels.place(index, packed)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Do as vLLM's `set_lora` of the layer does."""
        # vLLM's set_lora resets the slot first too: where `pack` raises, the slot is empty.
        self.place(index, None)
        self.place(index, self.pack(lora_a, lora_b))

    def reset_lora(self, index: int) -> None:
        """Do as vLLM's `reset_lora` of the layer does."""
        self.place(index, None)

    def _sides(self, lora_a: Any, lora_b: Any) -> list[tuple[Any, Any]]:
        """Return A and B of each slice as a slot of vLLM's would hold the pair, of rank 0 for an unadapted slice."""
        widths = self.shape.widths
        if lora_a is None and lora_b is None:  # the adapter does not adapt this layer
            lora_a = lora_b = [None] * len(widths)
        found = sides_of_slices(self._module, len(widths), lora_a, lora_b)
        if found is None:
            raise InvalidAdapter("weights of another number of slices", expected=f"{len(widths)} slices")
        return [
            self._pair(a, b, width, most)
            for a, b, width, most in zip(*found, widths, self.panels.ranks.largest, strict=True)
        ]

    def _pair(self, a: Any, b: Any, width: int, most: int) -> tuple[Any, Any]:
        """Return A and B of the same rank and of the slot's widths, filled up with zeros as in a slot.

        `width`: the slice's outputs. `most`: the largest rank of the slot.
        """
        inn = self.shape.inn
        if a is None or b is None:
            return torch.empty(0, inn), torch.empty(width, 0)
        if max(a.shape[0], b.shape[1]) > most or a.shape[1] > inn or b.shape[0] > width:
            raise InvalidAdapter(
                f"lora_A of {tuple(a.shape)} and lora_B of {tuple(b.shape)}",
                expected=f"at most {(most, inn)} and {(width, most)}",
                remedy="serve it with the base model that it was trained on, or raise --max-lora-rank",
            )
        # vLLM copies both sides into a zeroed slot: ranks beyond the smaller side multiply zeros.
        rank = min(a.shape[0], b.shape[1])
        a, b = a[:rank], b[:, :rank]
        if a.shape[1] < inn:
            a = torch.nn.functional.pad(a, (0, inn - a.shape[1]))
        if b.shape[0] < width:
            b = torch.nn.functional.pad(b, (0, 0, 0, width - b.shape[0]))
        return a, b

    def _size(self, sides: Sequence[tuple[Any, Any]]) -> int:
        return size(self.panels.product, self.shape, [int(a.shape[0]) for a, _ in sides])


def give_packer(module: Any, product: Callable[[str], Product]) -> None:
    """Give the layer a packer in the place of its stacks, if panels can serve every product with the layer's slots.

    Args:
        module: vLLM's layer, whose weights have been created; a layer that was written before stays unchanged.
        product: returns the compiled product of a dtype.
    """
    parts = stacks(module)
    if parts is None or watched_ranks(module) is not None or hasattr(module, "set_module_to_save"):
        # No pairs of A and B, or a layer that was registered before. A classification head (`set_module_to_save`, vLLM
        # 0.31 and later) holds more than A and B.
        return
    a, b = parts
    sharded = bool(getattr(getattr(module, "lora_config", None), "fully_sharded_loras", False))
    is_plain = all(a_i.ndim == 4 and a_i.shape[2] == b_i.shape[3] for a_i, b_i in zip(a, b, strict=True))
    if not is_plain or not are_pointed(a[0].dtype, fully_sharded=sharded):
        return
    # `expand` of a single element has stride 0: all shapes stay readable, no memory is taken, and PyTorch refuses
    # writes.
    a, b = (tuple(part.new_zeros(1).expand(part.shape) for part in side) for side in parts)
    # A head of vLLM's holds its only pair without a tuple, and passes the pair on in the same form.
    one = not isinstance(module.lora_a_stacked, tuple)
    module.lora_a_stacked, module.lora_b_stacked = (a[0], b[0]) if one else (a, b)
    ranks = SlotRanks(b[0].shape[0], [int(b_i.shape[3]) for b_i in b], is_empty=True)
    packer = Packer(module, SlotPanels(product(str(a[0].dtype).removeprefix("torch.")), a, b, ranks))
    module.set_lora, module.reset_lora = packer.set_lora, packer.reset_lora
    note_ranks(module, ranks)
    setattr(module, _PACKER, packer)


def packer_of(module: Any) -> Packer | None:
    packer = getattr(module, _PACKER, None)
    return packer if isinstance(packer, Packer) else None


def _scaled(b: Any, scaling: float) -> Any:
    return b if scaling == 1 else b * scaling


def _in_rows(side: Any, dtype: Any) -> Any:
    """Return `side` in `dtype`, each row contiguous."""
    side = side.to(dtype)
    return side if side.stride(1) == 1 else side.contiguous()


def _part_of(memory: Any, n_bytes: int) -> Any:
    # The compiled code checks nothing, and would write beyond the memory.
    if memory.numel() < n_bytes or memory.data_ptr() % ALIGNMENT:
        found = f"memory of {memory.numel()} bytes at {memory.data_ptr():#x}"
        raise ValueError(f"{found}: {n_bytes} bytes at a multiple of {ALIGNMENT} are needed")
    return memory[:n_bytes]
