"""vLLM's own LoRA layers around vLLM's own linear layers, and our Triton wrapper below them, in Triton's interpreter.

The expected answer is float64, of the adapters as they were given to `set_lora`: nothing that the layer or the wrapper
keeps is used for it. What lies beyond a true rank in the slots is NaN, so that reading it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu

from lora_plugins.kernels import reference
from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.punica_triton import TritonPunicaWrapper
from lora_plugins.kernels.slot_ranks import Vectors
from tests.kernels.triton_bed import TOLERANCE, some_vectors

punica_gpu.LoRAKernelMeta = LoRAKernelMeta  # which vLLM imports itself only where it finds a GPU

MAX_RANK, SLOTS, MAX_ROWS, VOCABULARY = 16, 5, 64, 40
IDS = [7, None, 5, 9, None]  # of the adapters in the slots; two hold none
RANKS = {0: 16, 2: 5, 3: 8}  # of the adapters, by slot
MIXED = [0, -1, 3, 2, 2, -1, 0]


def lora_config(dtype: torch.dtype = torch.float32, **changes: Any) -> LoRAConfig:
    return LoRAConfig(max_lora_rank=MAX_RANK, max_loras=SLOTS, max_cpu_loras=SLOTS, lora_dtype=dtype, **changes)


def make_wrapper(config: LoRAConfig | None = None, max_rows: int = MAX_ROWS) -> TritonPunicaWrapper:
    return TritonPunicaWrapper(max_rows, 16, "cpu", lora_config=config or lora_config())


def map_rows(wrapper: TritonPunicaWrapper, slot_of_row: Sequence[int], sampled: Sequence[int] | None = None) -> None:
    """Tell the wrapper of a batch, as vLLM does: by the adapters' ids, 0 for none."""

    def ids(slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if slot < 0 else IDS[slot] or 0 for slot in slots)

    mapping = LoRAMapping(ids(slot_of_row), ids(slot_of_row if sampled is None else sampled), is_prefill=True)
    wrapper.update_metadata(mapping, IDS, SLOTS + 1, VOCABULARY)


def with_mapping(layer: Any, wrapper: TritonPunicaWrapper) -> Any:
    """The layer, calling this wrapper and known to it, as the wrapped `set_mapping` does (worker/punica_wrapper.py)."""
    layer.set_mapping(wrapper)
    wrapper.register(layer)
    return layer


def ready(base: torch.nn.Module) -> torch.nn.Module:
    """Random weights, and what vLLM does once they are loaded."""
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if getattr(base, "quant_method", None) is not None:
        base.quant_method.process_weights_after_loading(base)
    return base


@dataclass
class Adapters:
    """What is in the slots of one layer: `[rank, in]` and `[out, rank]` for each slice, None where it is not adapted.

    Attributes:
        widths: columns of each slice.
        vectors: by slot, of adapters that have any.
    """

    widths: Sequence[int]
    sides: dict[int, list[tuple[torch.Tensor, torch.Tensor] | None]] = field(default_factory=dict)
    vectors: dict[int, Vectors] = field(default_factory=dict)

    @classmethod
    def fill(
        cls,
        layer: Any,
        n_in: int,
        widths: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        ranks: dict[int, Any] = RANKS,
        packed: bool = True,
        give: Callable[[int, Any, Any], None] | None = None,
    ) -> Adapters:
        """Random adapters through the layer's `set_lora`; `ranks[slot]` is one for all slices, or one for each.

        Args:
            packed: whether `set_lora` takes a pair for each slice. Else one A, and the B's of all slices in one.
            give: takes the place of `set_lora`.
        """
        made = cls(list(widths))
        for slot in range(SLOTS):
            if slot not in ranks:
                layer.reset_lora(slot)
                continue
            of_slices = [ranks[slot]] * len(widths) if isinstance(ranks[slot], int) else ranks[slot]
            sides: list[tuple[torch.Tensor, torch.Tensor] | None] = [
                (torch.randn(rank, n_in).to(dtype), (torch.randn(width, rank) / 4).to(dtype)) if rank else None
                for rank, width in zip(of_slices, widths, strict=True)
            ]
            give_to = give or layer.set_lora
            if not packed:
                a = sides[0][0]  # type: ignore[index]
                sides = [(a, side[1]) for side in sides if side]
                give_to(slot, a, torch.cat([side[1] for side in sides if side]))
            elif len(widths) == 1:
                give_to(slot, *sides[0])  # type: ignore[misc]
            else:
                give_to(slot, [side and side[0] for side in sides], [side and side[1] for side in sides])
            made.sides[slot] = sides
        return made

    def turn(self, layer: Any, *slots: int) -> None:
        """Give the present content of these slots vectors, as a worker does after writing them."""
        for slot in slots:
            self.vectors[slot] = some_vectors(sum(self.widths), slot)
            watched_ranks(layer).turn(slot, self.vectors[slot])  # type: ignore[union-attr]

    def expected(
        self, y: torch.Tensor, x: torch.Tensor, slot_of_row: Sequence[int], *, add_inputs: bool = True
    ) -> torch.Tensor:
        """`y` in float64 with every row's adapter, by the reference."""
        slots = max([*self.sides, *self.vectors], default=0) + 1
        rank = max((side[0].shape[0] for sides in self.sides.values() for side in sides if side), default=1)
        a = [torch.zeros(slots, 1, rank, x.shape[1], dtype=torch.float64) for _ in self.widths]
        b = [torch.zeros(slots, 1, width, rank, dtype=torch.float64) for width in self.widths]
        ranks = [[0] * len(self.widths) for _ in range(slots)]
        for slot, sides in self.sides.items():
            for i, side in enumerate(sides):
                if side is not None:
                    ranks[slot][i] = side[0].shape[0]
                    a[i][slot, 0, : ranks[slot][i]] = side[0]
                    b[i][slot, 0, :, : ranks[slot][i]] = side[1]
        result = y.double()
        known = [slot if slot in self.sides or slot in self.vectors else -1 for slot in slot_of_row]
        reference.lora_linear(
            result, x.double(), a, b, known, ranks, self.widths, add_inputs=add_inputs, vectors=self.vectors
        )
        return result


def set_traps(layer: Any) -> None:
    """NaN wherever an adapter has left zeros: beyond its rank, and in slots that hold none."""
    for stacks in (layer.lora_a_stacked, layer.lora_b_stacked):
        for part in stacks if isinstance(stacks, tuple) else (stacks,):
            part[part == 0] = torch.nan


def check(
    found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, slot_of_row: Sequence[int], **tolerance: float
) -> None:
    """Adapted rows are the reference's; base rows and padding are what they were, bit for bit."""
    adapted = [row for row, slot in enumerate(slot_of_row[: found.shape[0]]) if slot in RANKS]
    others = [row for row in range(found.shape[0]) if row not in set(adapted)]
    assert torch.equal(found[others], before[others])
    assert found.isfinite().all()
    assert not adapted or not torch.equal(found[adapted], before[adapted]), "no row has its adapter"
    want = expected[adapted]
    error = (found[adapted].double() - want).abs().max().item() if adapted else 0.0
    limit = tolerance.get("tolerance", TOLERANCE[found.dtype]) * max(1.0, want.abs().max().item() if adapted else 1.0)
    assert error <= limit, (error, limit)
