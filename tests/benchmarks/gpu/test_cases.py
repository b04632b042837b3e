"""What is measured, what it could cost at best, and whether goals are reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case

SMALL = Case("Llama-8B", "qkv", 4, 2, 8, 16)


def test_the_cases_begin_with_what_users_have() -> None:
    found = list(cases.cases())
    assert len(set(found)) == len(found)
    assert {case.rows for case in found} == {1, 4, 16, 64, 256, 1024, 2048, 8192}
    users = [case for case in found if case.slots]
    assert found[: len(users)] == users
    assert {(case.slots, case.adapters) for case in users} == {(64, 1), (64, 4), (64, 16), (128, 4), (128, 16)}
    assert {case.rows for case in users} == {1, 4, 16, 64, 256, 1024}
    assert {(case.rank, case.slot_rank) for case in users[:60]} == {(16, 128)}  # the goal of twice as fast
    assert any(case.mixed and case.base_rows for case in users)
    assert {case.model for case in found} == {"Llama-8B", "Llama-70B"}
    assert all(case.rank <= case.slot_rank and case.adapters <= case.rows for case in found)
    groups = cases.by_weights(found)
    assert sorted(map(repr, found)) == sorted(repr(case) for group in groups for case in group)


def test_every_adapter_has_rows_and_prompts_lie_in_one_piece() -> None:
    for case in cases.cases():
        slots = case.slot_of_row()
        assert len(slots) == case.rows
        assert {slot for slot in slots if slot >= 0} == {case.slot_of(adapter) for adapter in range(case.adapters)}
        assert (-1 in slots) is case.base_rows
        assert max(slots) < case.n_slots
        if case.prefill:
            assert slots == sorted(slots)


def test_mixed_ranks_are_all_halvings_down_to_8() -> None:
    case = Case("Llama-8B", "qkv", 64, 16, 64, 64, slots=64, mixed=True)
    assert {case.rank_of_slot(slot) for slot in case.slot_of_row()} == {64, 32, 16, 8}
    assert {replace(case, mixed=False).rank_of_slot(slot) for slot in range(64)} == {64}


def test_the_floor_counts_each_byte_once() -> None:
    case = Case("Llama-8B", "o", 64, 4, 16, 128)
    x_and_y = 64 * 4096 * 2 + 2 * 64 * 4096 * 2
    a_and_b = 4 * 16 * (4096 + 4096) * 2
    assert case.floor_bytes() == x_and_y + a_and_b
    assert replace(case, slot_rank=256, slots=64).floor_bytes() == case.floor_bytes()  # padding need not move
    assert replace(case, base_rows=True).floor_bytes() == x_and_y // 2 + a_and_b
    assert case.floor_us(1e12) == pytest.approx(case.floor_bytes() / 1e6)


def test_goals_omit_what_was_not_measured() -> None:
    def row(case: Case, ours: float, vllm: float | None) -> dict[str, object]:
        us = {"ours graph": ours}
        if vllm is not None:
            us |= {"vllm graph": vllm, "vllm specialized graph": vllm + 1}
        return cases.row(case, us, 2.0)

    same, padded = Case("Llama-8B", "o", 64, 4, 16, 16), Case("Llama-8B", "o", 16, 16, 16, 128, slots=64)
    never_slower, twice, floor, *_ = cases.goals([row(same, 4.0, 3.0), row(same, 2.0, 3.0), row(padded, 4.0, None)])
    assert (never_slower["measured"], never_slower["held"], never_slower["worst"]) == (2, 1, 0.75)
    assert twice == {"goal": twice["goal"], "measured": 0}
    assert (floor["measured"], floor["held"], floor["worst"], floor["median"]) == (2, 1, 2.0, 1.5)


def test_ours_is_held_to_the_fastest_of_vllms_ways() -> None:
    us = {"ours graph": 3.0, "vllm graph": 6.0, "vllm specialized graph": 2.0, "vllm eager": 1.0}
    assert cases.row(SMALL, us, 1.0)["vllm/ours graph"] == pytest.approx(2 / 3, abs=1e-3)


def test_the_share_of_base_is_that_of_all_layers_together() -> None:
    def layer(name: str, base_us: float, ours_us: float) -> dict[str, object]:
        case = Case("Llama-8B", name, 64, 4, 16, 128, slots=64)
        return cases.row(case, {"base graph": base_us, "ours graph": ours_us}, 1.0)

    rows = [layer("qkv", 30.0, 1.0), layer("o", 10.0, 1.0), layer("gate_up", 40.0, 1.0)]
    assert cases.goals(rows)[4] == {"goal": "4 of 64 adapters of rank 16: 92% of base", "measured": 0}
    share = cases.goals([*rows, layer("down", 20.0, 1.0)])[4]
    assert (share["measured"], share["held"], share["worst"]) == (1, 1, pytest.approx(100 / 104))
