"""What the benchmark of frameworks' own programs calls failed, cut, or longer than a version."""

from __future__ import annotations

import json

import pytest

from benchmarks.frameworks.__main__ import faults, goals
from benchmarks.frameworks.judged import COMPLETIONS, LOAD, UNLOAD, fault_of, figures, syncs
from benchmarks.recorder import Call

V1, V2 = "trl-policy-v1", "trl-policy-v2"


def rollout(name: str, began_s: float, ended_s: float, *, reason: str = "length", count: int = 4, status: int = 200):
    choice = {"token_ids": [7] * count, "finish_reason": reason}
    answer = json.dumps({"choices": [choice]}) if status == 200 else "no such model"
    body = {"model": name, "prompt": [1], "max_tokens": 4}
    return Call(COMPLETIONS, body, began_s, ended_s, status, f"digest of {name}", answer)


def sync(began_s: float, *, unloads: str = "") -> list[Call]:
    calls = [Call("/pause", {}, began_s, began_s + 0.1, 200), Call(LOAD, {}, began_s + 0.2, began_s + 0.3, 200)]
    calls.append(Call("/resume", {}, began_s + 0.3, began_s + 0.4, 200))
    return calls + [Call(UNLOAD, {"lora_name": unloads}, began_s + 0.5, began_s + 0.6, 200)] * bool(unloads)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (rollout(V1, 0, 1), None),
        (rollout(V1, 0, 1, reason="stop", count=2), None),
        (rollout(V1, 0, 1, count=3), "length after 3 of 4 tokens"),
        (rollout(V1, 0, 1, reason="abort", count=2), "abort after 2 of 4 tokens"),
        (rollout(V1, 0, 1, status=404), "404: no such model"),
        (Call(COMPLETIONS, {}, 0, 1, None), None),
    ],
)
def test_a_rollout_is_whole_failed_or_cut(call: Call, fault: str | None) -> None:
    assert fault_of(call) == fault


def test_a_sync_goes_from_the_pause_to_the_unload() -> None:
    found = [(one.began_s, round(one.ended_s, 1), one.unload_s) for one in syncs([*sync(1), *sync(2, unloads=V1)])]
    assert [it[:2] for it in found] == [(1, 1.4), (2, 2.6)]
    assert found[0][2] is None
    assert found[1][2] == pytest.approx(0.1)


def test_rollouts_longer_than_a_version_are_counted() -> None:
    rollouts = [rollout(V1, 1.5, 3), rollout(V1, 1.5, 1.9), rollout(V2, 2.7, 3.5)]
    row = figures([*sync(1), *rollouts, *sync(2, unloads=V1)])
    assert (row["rollouts"], row["longer_than_a_version"], row["ended_after_their_unload"]) == (3, 1, 1)
    assert row["digests"] == {V1: [f"digest of {V1}"], V2: [f"digest of {V2}"]}


@pytest.mark.parametrize(
    ("changed", "is_wrong"),
    [
        ({}, False),
        ({"faults": ["404: x"]}, True),
        ({"status": 1}, True),
        ({"weights": {"computed": 4, "own": 3, "told_apart": 4}}, True),
        ({"weights": {"computed": 4, "own": 4, "told_apart": 1}}, True),
        ({"digests": {V1: ["a"], V2: ["a"]}}, True),
        ({"digests": {V1: ["None"], V2: ["a"]}}, True),
        ({"said": ["v2"], "right": ["v1"]}, True),
    ],
)
def test_a_row_of_ours_is_right_or_wrong(changed: dict, is_wrong: bool) -> None:
    row = {"arm": "ours", "faults": [], "status": 0, "weights": {"computed": 4, "own": 4, "told_apart": 2}}
    row |= {"digests": {V1: ["a"], V2: ["b"]}, **changed}
    assert bool(faults(row)) == is_wrong
    assert goals([row])["failed, cut or wrong, ours: 0"][1] == (not is_wrong)


def test_a_slow_unload_or_sync_misses_its_goal() -> None:
    rows = [{"arm": arm, "max_loras": 4, "sync_s": [sync_s]} for arm, sync_s in (("ours", 1.3), ("stock", 1.0))]
    rows += [{"arm": arm, "idle_s": [0.03]} for arm in ("ours", "stock")]
    assert [is_met for _, is_met in goals(rows).values()] == [True, False, False, True]
