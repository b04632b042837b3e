"""A batch for the Triton kernels: what must not be read is NaN, what must not be written is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from lora_plugins.kernels import reference
from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors
from lora_plugins.kernels.triton_ops.chunks import Chunks
from lora_plugins.kernels.triton_ops.packed import PackedModule
from lora_plugins.kernels.triton_ops.rank_tables import DeviceRanks, follow_vectors

# Largest error relative to the largest value, against float64: input and t are rounded to the dtype once each.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def some_vectors(outputs: int, seed: int) -> Vectors:
    draw = torch.Generator().manual_seed(seed)
    return Vectors(*torch.randn(2, outputs, generator=draw))


@dataclass
class Bed:
    """Inputs of one call. `ranks[slot][slice]` as in `reference`; `padding` rows follow the batch in x and y."""

    x: torch.Tensor
    y: torch.Tensor
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    slot_of_row: list[int]
    ranks: list[list[int]]
    widths: list[int]
    max_rank: int
    vectors: dict[int, Vectors] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        slot_of_row: Sequence[int],
        ranks: Sequence[Sequence[int]],
        *,
        n_in: int = 48,
        widths: Sequence[int] = (32,),
        max_rank: int = 32,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
        seed: int = 0,
        turned: Collection[int] = (),
    ) -> Bed:
        """`turned`: slots whose adapters have vectors."""
        draw = torch.Generator().manual_seed(seed)
        rows = len(slot_of_row) + padding

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        x, y = normal(rows, n_in), normal(rows, sum(widths))
        x[len(slot_of_row) :] = float("nan")
        for row, slot in enumerate(slot_of_row):
            if slot < 0:
                x[row] = float("nan")  # no kernel may read a base row
        a = [normal(len(ranks), 1, max_rank, n_in) / n_in**0.5 for _ in widths]
        b = [normal(len(ranks), 1, width, max_rank) / 4 for width in widths]
        for slot, per_slice in enumerate(ranks):
            for i, rank in enumerate(per_slice):
                a[i][slot, 0, rank:] = float("nan")
                b[i][slot, 0, :, rank:] = float("nan")
        vectors = {slot: some_vectors(sum(widths), seed + slot) for slot in turned}
        return cls(x, y, a, b, list(slot_of_row), [list(r) for r in ranks], list(widths), max_rank, vectors)

    @property
    def module(self) -> PackedModule:
        return PackedModule(self.a, self.b, self.widths)

    @property
    def slot_ranks(self) -> SlotRanks:
        """Ranks and vectors as a layer's writer notes them."""
        ranks = SlotRanks(len(self.ranks), [self.max_rank] * len(self.widths))
        for slot, per_slice in enumerate(self.ranks):
            ranks.written(slot, per_slice)
            if slot in self.vectors:
                ranks.turn(slot, self.vectors[slot])
        return ranks

    @property
    def device_ranks(self) -> torch.Tensor:
        return DeviceRanks().follow(self.slot_ranks, len(self.ranks), "cpu")

    @property
    def device_vectors(self) -> torch.Tensor:
        """What no kernel may read is NaN."""
        table = follow_vectors(self.slot_ranks, len(self.ranks), sum(self.widths), "cpu")
        for slot in range(len(self.ranks)):
            if slot not in self.vectors:
                table[slot] = torch.nan
        return table

    def chunks(self, max_rows: int | None = None) -> Chunks:
        chunks = Chunks(max_rows or max(1, self.x.shape[0]), len(self.ranks), "cpu")
        chunks.cut(torch.tensor(self.slot_of_row, dtype=torch.int64))
        return chunks

    def expected(self, *, scale: float = 1.0, add_inputs: bool = True) -> torch.Tensor:
        """y in float64 by the reference; base rows and padding are the y that was given."""
        y = self.y.double()
        reference.lora_linear(
            y,
            self.x.double(),
            [part.double() for part in self.a],
            [part.double() for part in self.b],
            self.slot_of_row,
            self.ranks,
            self.widths,
            scale=scale,
            add_inputs=add_inputs,
            vectors={slot: Vectors(*(side.double() for side in own)) for slot, own in self.vectors.items()},
        )
        return y

    def check(self, y: torch.Tensor, *, scale: float = 1.0, add_inputs: bool = True) -> None:
        """Adapted rows are right to the tolerance; all others are what they were, bit for bit."""
        want = self.expected(scale=scale, add_inputs=add_inputs)
        untouched = [row for row in range(y.shape[0]) if row >= len(self.slot_of_row) or self.slot_of_row[row] < 0]
        assert torch.equal(y[untouched], self.y[untouched])
        assert not y.isnan().any()
        if y.numel():
            error = (y.double() - want).abs().max().item()
            assert error <= TOLERANCE[y.dtype] * max(1.0, want.abs().max().item())
