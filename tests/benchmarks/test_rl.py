"""What the loop of a policy that is served counts: `benchmarks/rl.py`."""

from __future__ import annotations

import pytest

from benchmarks.rl import LATE, MIXED, ON_POLICY, UNKNOWN, is_as_wanted, stamp, summary


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (("new",), ON_POLICY),
        (("old",), LATE),
        (("old", "new"), MIXED),
        ((), UNKNOWN),
        (("older",), UNKNOWN),
        (("older", "new"), UNKNOWN),
    ],
)
def test_a_stamp_says_which_version_answered(versions: tuple[str, ...], said: str) -> None:
    assert stamp(versions, "new", "old") == said


def test_no_version_is_known_of_a_server_without_stamps() -> None:
    assert stamp((), None, None) == UNKNOWN


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ({}, True),
        ({"other_logprobs": {MIXED: 1}}, True),
        ({"other_logprobs": {LATE: 1}}, False),
        ({"other_logprobs": {ON_POLICY: 1}}, False),
        ({"stamps": {ON_POLICY: 31, UNKNOWN: 1}}, False),
        ({"reward": 0.1}, False),
    ],
)
def test_a_false_or_lacking_stamp_is_noticed(changed: dict, is_right: bool) -> None:
    row = {"arm": "finish", "reward": 0.1, "stamps": {ON_POLICY: 32}, "other_logprobs": {}, "other_logprobs_after": 0}
    ours = summary("finish", [row, {**row, "reward": 0.9, **changed}])
    assert is_as_wanted({"finish": ours, "inflight": ours, "stock": ours}) is is_right
