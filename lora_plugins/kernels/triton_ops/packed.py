"""A packed module (q, k and v in one layer) as Triton kernels read the module: one launch serves all its slices.

In a worker with GPUs, `operators.py` makes a `PackedModule` at a module's first call, and `Operands` for each call;
`shrink.py` and `expand.py` turn `Operands` into the arguments of their kernels. The weights stay in vLLM's stacks: a
kernel gets a table on the device with the stacks' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lora_plugins.kernels.triton_ops.chunks import Chunks

ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


INTERPRETED = bool(triton.knobs.runtime.interpret)  # as Triton read the variable when Triton made these kernels


def precision(dtype: Any) -> str:
    """Return how tiles are to be multiplied: float32 as float32, not rounded to TF32.

    Triton's interpreter (3.6) multiplies the bits of bfloat16 as integers, so the kernels widen bfloat16 first.
    """
    if INTERPRETED and dtype == torch.bfloat16:
        return "widened"
    return "ieee" if dtype == torch.float32 else "tf32"


def columns(of_two_bytes: int, dtype: Any) -> int:
    """Return a tile's columns for `dtype`; tables count elements of 2 bytes, and as many of 4 exceed the registers."""
    return max(16, of_two_bytes * 2 // int(dtype.itemsize))


class PackedModule:
    """The stacked A and B of a module's slices, in vLLM's layout (vllm/lora/layers/base_linear.py, 0.33).

    Attributes:
        table: int64 `[5, slices]` on the device: addresses of A and of B, widths, first columns in y, rows of B.
        aligned: every address is a multiple of 16 bytes, every width and first column of 8; so wide loads are right.
        a_strides: elements from slot to slot and from rank to rank. b_row_stride: elements from column to column of y.
        stacks: A's and B's, each without the axis of size 1.
    """

    def __init__(self, a: Sequence[Any], b: Sequence[Any], output_slices: Sequence[int], offset_start: int = 0) -> None:
        """Describe `a[i]`: `[slots, 1, max_rank, in]`, `b[i]`: `[slots, 1, out_i, max_rank]` (the 1 may be missing).

        Either may be empty where a caller wants only the other product.

        Raises:
            ValueError: shapes or strides that a single launch cannot serve. TypeError: a dtype that the kernels do not
                have.
        """
        a, b = tuple(_three_axes(part) for part in a), tuple(_three_axes(part) for part in b)
        check_stacks(a, b, output_slices)
        # Either side has the slots and the dtype; `check_stacks` has compared both.
        first = (a or b)[0]
        self.slices, self.slots = len(a or b), first.shape[0]
        self.dtype = first.dtype
        self.max_rank = a[0].shape[1] if a else b[0].shape[2]
        self.a_strides = (a[0].stride(0), a[0].stride(1)) if a else (0, 0)
        self.b_row_stride = b[0].stride(1) if b else 0
        self.widest = max(output_slices, default=0)
        self.stacks = (a, b)  # the table holds addresses only, so the tensors must live as long
        none = [0] * self.slices
        widths = list(output_slices) if b else none
        columns = list(accumulate(widths[:-1], initial=offset_start)) if b else none
        of_a, of_b = ([part.data_ptr() for part in side] or none for side in self.stacks)
        self.aligned = all(address % 16 == 0 for address in (*of_a, *of_b)) and all(
            value % 8 == 0 for value in (*widths, *columns)
        )
        rows = [of_a, of_b, widths, columns, [part.shape[1] for part in b] or none]
        # Built on the host and copied once: reading addresses back from the device would wait.
        self.table = torch.tensor(rows, dtype=torch.int64).to(first.device)


def check_stacks(a: Sequence[Any], b: Sequence[Any], output_slices: Sequence[int]) -> None:
    """Refuse stacks `[slots, max_rank, in]` and `[slots, out, max_rank]` that a single launch cannot serve.

    Raises:
        ValueError: their shapes or strides. TypeError: a dtype that the kernels do not have.
    """
    dtypes = {part.dtype for part in (*a, *b)}
    if len(dtypes) > 1 or not dtypes <= ELEMENTS.keys():
        raise TypeError(f"LoRA weights of {sorted(map(str, dtypes))}; all must be one of {sorted(map(str, ELEMENTS))}")
    if len({(part.shape, part.stride()) for part in a}) > 1:
        raise ValueError(f"stacked A of one module differ: {[tuple(part.shape) for part in a]}")
    if len({(part.shape[2], part.stride(1)) for part in b}) > 1:
        raise ValueError(f"stacked B of one module differ in rank: {[tuple(part.shape) for part in b]}")
    if not all(part.stride(2) == 1 for part in (*a, *b)) or not all(
        part.stride(0) == part.shape[1] * part.stride(1) for part in b
    ):
        raise ValueError("stacked LoRA weights must be contiguous")
    if b and any(width > part.shape[1] for width, part in zip(output_slices, b, strict=True)):
        raise ValueError(f"slices of {tuple(output_slices)} columns, B of {[part.shape[1] for part in b]}")


class Operands(NamedTuple):
    """A module, and the batch that the module computes: the operands that shrink and expand share.

    Attributes:
        module: the stacked A and B of all slices. A shrink reads A alone, an expand B alone.
        ranks: int32 `[slices + 1, slots]` on the device, see `DeviceRanks`.
        vectors: float32 `[slots, 2, columns]` on the device, see `follow_vectors`; read where `ranks` says so.
        chunks: the batch, cut.
        size: rows of a chunk, an element of `SIZES`.
    """

    module: PackedModule
    ranks: Any
    vectors: Any
    chunks: Chunks
    size: int

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """Return the arguments that every kernel begins with, for a layer of `rows` rows, in the kernels' order."""
        module, chunks = self.module.table, self.chunks
        return module, self.ranks, chunks.order, chunks.of_size(self.size), chunks.capacity, rows, *self.ranks.stride()

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments that all kernels share."""
        return {
            "ELEMENT": ELEMENTS[self.module.dtype],
            "ALIGNED": self.module.aligned,
            "PRECISION": precision(self.module.dtype),
            "SLICES": self.module.slices,
            "ROWS": self.size,
        }


def _three_axes(part: Any) -> Any:
    return part.squeeze(1) if part.ndim == 4 else part
