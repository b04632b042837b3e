"""Weights of the cases: as many as no cache holds, and what is timed on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import cases, weights
from benchmarks.gpu.cases import Case
from lora_plugins.kernels.triton_ops.operators import Operators
from tests.kernels.triton_bed import TOLERANCE

SMALL = Case("Llama-8B", "qkv", 4, 2, 8, 16)


def test_copies_exceed_the_cache_within_the_budget() -> None:
    case = Case("Llama-8B", "qkv", 64, 4, 16, 128)
    read = 4 * 16 * (3 * 4096 + 6144) * 2
    copies = weights.copies_for(case)
    assert (copies - 1) * read < weights.COLD_BYTES <= copies * read
    assert weights.copies_for(case, 3 * read * 128 // 16) == 3
    assert weights.copies_for(case, 0) == 1
    many_slots = replace(case, slots=64)
    assert weights.copies_for(many_slots) == copies  # what is read counts
    assert weights.copies_that_fit(many_slots, 2 * read * 128) == 2


@pytest.mark.parametrize("mixed", [False, True], ids=["one rank", "mixed ranks"])
def test_what_is_timed_is_what_is_meant(made: Operators, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    monkeypatch.setitem(cases.MODELS, "Llama-8B", {"qkv": (48, (32, 16))})
    case = replace(SMALL, rank=16, slots=5, mixed=mixed, base_rows=True)
    stacks = weights.make_stacks(case, 2, torch.float32, "cpu")
    for slot in range(5):
        rank = case.rank_of_slot(slot)
        assert not stacks.a[0][0][slot, 0, rank:].any()
        assert stacks.a[0][0][slot, 0, :rank].any()
    x, y = torch.randn(4, 48), torch.zeros(4, 48)
    weights.ours(made, case, stacks, weights.batch_of(case, "cpu"))(1, y, x)
    want = torch.zeros(4, 48)
    for row, slot in enumerate(case.slot_of_row()):
        if slot >= 0:
            parts = zip(stacks.a[1], stacks.b[1], strict=True)
            want[row] = torch.cat([b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in parts])
    assert (y - want).abs().max() <= TOLERANCE[torch.float32] * want.abs().max().clamp_min(1)
    assert want.abs().max() > 0
