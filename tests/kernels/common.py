"""Random slots with NaN where no kernel may read, and outputs with NaN where none may write."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lora_plugins.kernels import reference
from lora_plugins.kernels.compiled import build
from lora_plugins.kernels.compiled.panels import SlotPanels
from lora_plugins.kernels.cpu import BatchRows, Buffers, ModulePlan, ModuleSlots
from lora_plugins.kernels.slot_ranks import SlotRanks, Vectors

# Largest allowed difference from the float32 reference, relative to the largest value of the output: a few units in the
# last place of the dtype, since shrunk rows and the sum are each rounded to it once.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def pairwise(
    *, indirect: Sequence[str] = (), **values: Sequence[object] | Mapping[str, object]
) -> pytest.MarkDecorator:
    """Parametrize with few combinations that have every pair of two parameters' values; a mapping names its values."""
    assert len(values) > 1
    kinds = [list(of.items()) if isinstance(of, Mapping) else [(str(one), one) for one in of] for of in values.values()]
    places = [(i, at) for i, of in enumerate(kinds) for at in range(len(of))]
    missing = {pair for pair in itertools.combinations(places, 2) if pair[0][0] != pair[1][0]}
    chosen = []
    while missing:
        row = dict(min(missing))  # one missing pair, and beside it what makes most others come along
        for i, of in enumerate(kinds):
            news = [sum(tuple(sorted([(i, at), one])) in missing for one in row.items()) for at in range(len(of))]
            row.setdefault(i, max(range(len(of)), key=lambda at, news=news: (news[at], -(at + len(chosen)) % len(of))))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        parts = [kinds[i][at] for i, at in sorted(row.items())]
        chosen.append(pytest.param(*(value for _, value in parts), id="-".join(name for name, _ in parts)))
    return pytest.mark.parametrize(",".join(values), chosen, indirect=list(indirect))


@dataclass
class Case:
    """One module: its slots, true ranks, and a batch's input."""

    weights: ModuleSlots
    ranks: list[tuple[int, ...]]
    x: torch.Tensor
    slot_of_row: list[int]
    widths: tuple[int, ...]

    def outputs(self, padding_rows: int = 0) -> torch.Tensor:
        """Random `y`, NaN in the base model's rows and in padding: what is added there, or read from there, shows."""
        y = torch.randn(len(self.slot_of_row) + padding_rows, sum(self.widths)).to(self.x.dtype)
        for row in range(y.shape[0]):
            if row >= len(self.slot_of_row) or self.slot_of_row[row] < 0:
                y[row] = torch.nan
        return y

    def expected(self, y: torch.Tensor, **options: object) -> torch.Tensor:
        result = y.clone()
        weights = self.weights
        reference.lora_linear(
            result, self.x, weights.a, weights.b, self.slot_of_row, self.ranks, self.widths,
            vectors=weights.ranks.vectors, **options,
        )  # fmt: skip
        return result

    def plan(self, buffers: Buffers | None = None, scale: float = 1.0) -> ModulePlan:
        return ModulePlan(self.weights, batch_of(self.slot_of_row), buffers or Buffers(), scale)

    def computed(self, y: torch.Tensor, buffers: Buffers | None = None, scale: float = 1.0) -> torch.Tensor:
        result = y.clone()
        self.plan(buffers, scale).run(result, self.x)
        return result

    def check(self, buffers: Buffers | None = None, scale: float = 1.0, padding_rows: int = 0) -> None:
        """Compute the batch, and compare it with the reference."""
        y = self.outputs(padding_rows)
        assert_equal(self.computed(y, buffers, scale), self.expected(y, scale=scale), y, self.slot_of_row)


def batch_of(slot_of_row: list[int]) -> BatchRows:
    return BatchRows(torch.tensor(slot_of_row, dtype=torch.int64))


def forget_what_was_built() -> None:
    """What this process knows of the compiler and of the wheel's objects is found out again."""
    for found in (build.problem, build.product, build._of_wheel):
        found.cache_clear()


def make_case(
    slot_of_row: list[int],
    ranks: list[tuple[int, ...]],
    *,
    inn: int = 33,
    widths: tuple[int, ...] = (19,),
    max_rank: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    products: str = "torch",
    turned: Iterable[int] = (),
) -> Case:
    """`turned`: slots whose adapters have vectors."""
    generator = torch.Generator().manual_seed(seed)
    of_vectors, slots = torch.Generator().manual_seed(seed + 1), len(ranks)
    a = [torch.full((slots, 1, max_rank, inn), torch.nan, dtype=dtype) for _ in widths]
    b = [torch.full((slots, 1, width, max_rank), torch.nan, dtype=dtype) for width in widths]
    learned = SlotRanks(slots, [max_rank] * len(widths))
    for slot, of_slices in enumerate(ranks):
        for i, rank in enumerate(of_slices):
            a[i][slot, 0, :rank] = torch.randn(rank, inn, generator=generator) / inn**0.5
            b[i][slot, 0, :, :rank] = torch.randn(widths[i], rank, generator=generator)
        learned.written(slot, of_slices)
        if slot in turned:
            g, c = torch.randn(2, sum(widths), generator=of_vectors)
            learned.turn(slot, Vectors(g, c))
    x = torch.randn(len(slot_of_row), inn, generator=generator).to(dtype)
    panels = (
        SlotPanels(build.product(str(dtype).removeprefix("torch.")), a, b, learned) if products == "compiled" else None
    )
    return Case(ModuleSlots(tuple(a), tuple(b), learned, panels), list(ranks), x, slot_of_row, widths)


def assert_equal(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, slot_of_row: list[int]) -> None:
    """Adapted rows are the reference's, and finite; all others have the values that they had, NaN as NaN."""
    adapted = [row for row, slot in enumerate(slot_of_row) if slot >= 0 and row < found.shape[0]]
    others = [row for row in range(found.shape[0]) if row not in set(adapted)]
    assert torch.equal(found[others].isnan(), before[others].isnan())
    assert torch.equal(found[others].nan_to_num(), before[others].nan_to_num())
    if adapted:
        want = expected[adapted].float()
        assert want.isfinite().all()
        worst = (found[adapted].float() - want).abs().max() / want.abs().max().clamp(min=1)
        assert worst <= TOLERANCE[found.dtype], float(worst)


def padded_to(rows: int) -> AbstractContextManager[None]:
    """What vLLM says of a batch that it has padded to so many rows."""
    from vllm.forward_context import BatchDescriptor, override_forward_context

    return override_forward_context(SimpleNamespace(batch_descriptor=BatchDescriptor(rows)))
