"""The soak's oracle: what is right passes, and every kind of wrong answer is flagged."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from soak.bank import FORMS, PROMPTS, Bank
from soak.oracle import (
    DISK,
    DISK_IS_FULL,
    LONGEST_FLIGHT_S,
    UNASKED,
    Answer,
    Asked,
    Cause,
    Claim,
    Oracle,
    Windows,
    of_source,
)
from soak.world import World
from testbed.hub import Hub
from testbed.s3 import Bucket

TOKENS = [chr(65 + i) for i in range(26)]
BASE, OURS, OTHER = -1, 0, 1


class BankOfDigests(Bank):
    """One whose digests say of which adapter and version they are."""

    @property
    def versions_by_digest(self) -> dict[str, tuple[int, int]]:
        return {digest_of(adapter, version): (adapter, version) for adapter, version, _, _ in self.answers}


def digest_of(adapter: int, version: int) -> str:
    return f"{adapter}-{version}"


@pytest.fixture
def bank() -> Bank:
    """Four-token answers that begin with the adapter and the version, and differ by form and prompt."""
    answers = {
        (adapter, version, form, prompt): (adapter + 1, 10 + version, FORMS.index(form), prompt)
        for adapter in (BASE, OURS, OTHER)
        for version in range(3)
        for form in FORMS
        for prompt in range(len(PROMPTS))
        if adapter != BASE or version == 0
    }
    return BankOfDigests(Path(), Path(), answers, TOKENS, {})


@pytest.fixture
def oracle(bank: Bank) -> Oracle:
    """Version 0 is served until 10, version 1 from 8 on."""
    made = Oracle(bank, ("ours", "other"))
    made.sources_of = {"ours": ("s3",), "other": ("filesystem",)}
    made.of("ours").open(0, 0)
    made.of("ours").open(1, 8)
    made.of("ours").close(0, 10)
    made.of("other").open(0, 0)
    return made


def asked(began: float = 1, ended: float = 2, **more: object) -> Asked:
    return replace(Asked("ours", OURS, "text", 0, 4, began, ended), **more)


def of(bank: Bank, adapter: int, version: int, count: int = 4, **more: object) -> Answer:
    ids = bank.answers[adapter, version, "text", 0][:count]
    digest = None if adapter == BASE else digest_of(adapter, version)
    return replace(Answer(200, bank.text(ids), ids, digest=digest), **more)


OWN, BEFORE, AFTER, MEANWHILE, GONE = (1, 2), (1, 7.9), (11, 12), (7, 12), (10.1, 11)
VERDICTS = [  # who is asked and when, what answers, and what is wrong with it
    (OURS, OWN, (OURS, 0), None),
    (OURS, AFTER, (OURS, 1), None),
    (OURS, MEANWHILE, (OURS, 0), None),
    (OURS, MEANWHILE, (OURS, 1), None),
    (OURS, BEFORE, (OURS, 1), "its own version 1"),
    (OURS, GONE, (OURS, 0), "its own version 0"),
    (OURS, OWN, (OTHER, 0), "adapter 1's version 0"),
    (OURS, OWN, (BASE, 0), "the base model's"),
    (BASE, OWN, (BASE, 0), None),
    (BASE, OWN, (OURS, 0), "adapter 0's version 0"),
]


@pytest.mark.parametrize(("whom", "when", "answering", "why"), VERDICTS)
def test_only_a_version_that_was_valid_may_answer(
    bank: Bank, oracle: Oracle, whom: int, when: tuple[float, float], answering: tuple[int, int], why: str | None
) -> None:
    question = asked(*when) if whom == OURS else asked(*when, name="base", adapter=BASE)
    wrong = oracle.judge(question, of(bank, *answering))
    assert wrong is None if why is None else why in (wrong or "")


def test_an_answer_with_other_tokens_is_wrong(bank: Bank, oracle: Oracle) -> None:
    first = of(bank, OURS, 0).token_ids
    assert oracle.judge(asked(7, 12), Answer(200, "", (*first[:2], 9, 9))) is not None, "of two versions"
    assert "no version gives" in (oracle.judge(asked(), Answer(200, "", (*first[:3], 25))) or "")
    assert "3 tokens" in (oracle.judge(asked(), of(bank, OURS, 0, 3)) or "")


def test_text_is_compared_where_there_are_no_tokens(bank: Bank, oracle: Oracle) -> None:
    right = of(bank, OURS, 0, token_ids=None)
    assert oracle.judge(asked(), right) is None
    assert oracle.judge(asked(), replace(right, text=right.text[:3])) is not None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (digest_of(OURS, 0), None),
        (digest_of(OURS, 1), "the digest of version 1, and the answer of [0]"),
        (digest_of(OURS, 2), "the digest of (0, 2) where only versions [0, 1]"),
        (digest_of(OTHER, 0), "the digest of (1, 0)"),
        ("unknown", "the digest of None"),
        (None, "without a digest"),
    ],
)
def test_the_digest_is_that_of_the_answering_version(bank: Bank, oracle: Oracle, said: str | None, why: str) -> None:
    wrong = oracle.judge(asked(7, 12), of(bank, OURS, 0, digest=said))
    assert wrong is None if why is None else why in (wrong or "")


def test_a_digest_that_is_not_valid_yet_is_wrong(oracle: Oracle) -> None:
    """Of an answer whose tokens say nothing of the version, as those of /tokenize."""
    answer = Answer(200, digest=digest_of(OURS, 1))
    assert "only versions [0]" in (oracle.judge_digest(asked(1, 7.9), answer) or "")
    assert oracle.judge_digest(asked(7, 12), answer) is None


def test_where_several_versions_fit_each_digest_is_right(bank: Bank, oracle: Oracle) -> None:
    first_of_both = of(bank, OURS, 0, 1)
    assert first_of_both.token_ids == of(bank, OURS, 1, 1).token_ids
    for version in (0, 1):
        left = replace(first_of_both, status=0, is_whole=False, reason="left", digest=digest_of(OURS, version))
        assert oracle.judge(asked(7, 12), left) is None


def test_the_base_model_and_refusals_have_no_digest(bank: Bank, oracle: Oracle) -> None:
    base = asked(name="base", adapter=BASE)
    assert "no adapter answers" in (oracle.judge(base, of(bank, BASE, 0, digest=digest_of(OURS, 0))) or "")
    oracle.of("ours").open(Claim.ABSENT, 0)
    assert oracle.judge(asked(), Answer(404)) is None
    assert "a refusal with a digest" in (oracle.judge(asked(), Answer(404, digest=digest_of(OURS, 0))) or "")


def test_an_answer_may_end_early_only_while_unloading(bank: Bank, oracle: Oracle) -> None:
    ended = of(bank, OURS, 0, 2, is_whole=True, reason="abort")
    assert "too early" in (oracle.judge(asked(), ended) or "")
    oracle.of("ours").open(Claim.UNLOADING, 1.5)
    assert oracle.judge(asked(), ended) is None
    assert oracle.judge(asked(), replace(ended, token_ids=(1, 25))) is not None


@pytest.mark.parametrize("count", [0, 2, 4])
def test_what_a_client_saw_before_it_left_is_compared(bank: Bank, oracle: Oracle, count: int) -> None:
    left = of(bank, OURS, 0, count, status=0, is_whole=False, reason="left")
    assert oracle.judge(asked(), left) is None
    wrong = of(bank, OURS, 1, count, status=0, is_whole=False, reason="left")
    assert (oracle.judge(asked(), wrong) is None) == (count == 0)


@pytest.mark.parametrize("status", [400, 403, 404, 500, 503, 507])
def test_a_served_name_is_not_refused(oracle: Oracle, status: int) -> None:
    assert f"status {status}" in (oracle.judge(asked(), Answer(status)) or "")


def test_a_404_is_right_while_it_is_absent(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.ABSENT, 20)
    oracle.of("ours").close(Claim.ABSENT, 30)
    assert oracle.judge(asked(25, 26), Answer(404)) is None
    assert oracle.judge(asked(31, 32), Answer(404)) is not None
    assert oracle.judge(asked(25, 26), Answer(500)) is not None


def refused(oracle: Oracle, **more: object) -> bool:
    """Whether a refusal with our code for a failing source is right."""
    return oracle.judge(asked(**more), Answer(503, error="[L006] no answer")) is None


def test_a_503_needs_a_fault_of_its_source(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    oracle.causes.add(Cause("another's", of_source("hub"), 0))
    assert not refused(oracle)
    oracle.causes.add(Cause("gone", of_source("s3"), 1.9))
    assert refused(oracle)
    assert oracle.explained == {"gone": 1}
    assert oracle.judge(asked(), Answer(503, error="[L001] no slot")) is not None, "another code"
    assert oracle.judge(asked(), Answer(500, error="[L006] no answer")) is not None, "another status"
    oracle.of("ours").close(Claim.UNREGISTERED, 0.5)
    assert not refused(oracle), "registered, no source is asked"


def test_a_name_is_refused_only_while_a_fault_hits_it(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    cause = oracle.causes.add(Cause("stall", "ours", 10))
    assert not refused(oracle, began=8, ended=9.9)
    assert refused(oracle, began=8, ended=10.1)
    cause.ended = 20
    assert refused(oracle, began=20, ended=21)
    assert not refused(oracle, began=20.1, ended=21), "remembered too long"
    overdue = Answer(503, error="[L006] no complete answer within 20 s")
    assert oracle.judge(asked(began=20.1, ended=21), overdue) is None, "it had begun before"
    assert oracle.judge(asked(began=20 + LONGEST_FLIGHT_S, ended=99), overdue) is not None


def test_who_was_not_hit_is_refused_only_unasked(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    oracle.causes.add(Cause("stall", of_source("s3"), 0, texts=UNASKED))
    assert not refused(oracle)
    unasked = Answer(503, error=f"[L006] a source that is {UNASKED[0]}")
    assert oracle.judge(asked(), unasked) is None


def test_a_full_disk_explains_its_own_codes(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    full = Answer(507, error="[L004] a full disk")
    assert oracle.judge(asked(), full) is not None
    oracle.causes.add(Cause("disk full", DISK, 0, refusals=DISK_IS_FULL))
    assert oracle.judge(asked(), full) is None
    assert oracle.judge(asked(name="other", adapter=OTHER), full) is None, "a copy that is served gives way"
    oracle.causes.end_all(0.5)
    assert oracle.judge(asked(name="other", adapter=OTHER), full) is not None


def test_a_copy_that_gave_way_is_fetched_again(oracle: Oracle) -> None:
    question = asked(name="other", adapter=OTHER)
    oracle.causes.add(Cause("stall", "other", 0))
    assert not refused(oracle, name="other", adapter=OTHER), "it is served, whatever its source says"
    oracle.of("other").open(Claim.GIVEN_WAY, 0)
    assert oracle.judge(question, Answer(503, error="[L006] no answer")) is None


@pytest.mark.parametrize(("has_given_way", "may_be_gone"), [(True, True), (False, False)])
def test_what_no_source_has_may_leave_a_full_disk(
    bank: Bank, tmp_path: Path, has_given_way: bool, may_be_gone: bool
) -> None:
    world = World(bank, tmp_path, cast("Bucket", None), cast("Hub", None))
    one = world.names[0]
    one.current = None
    if has_given_way:
        world.may_give_way(one)
    world.serves(one, 0, may_change=True)
    now = time.monotonic()
    assert (Claim.ABSENT in world.oracle.of(one.name).during(now, now)) is may_be_gone


def test_who_was_refused_is_asked_again_afterwards(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    cause = oracle.causes.add(Cause("gone", "ours", 0))
    assert refused(oracle)
    monkeypatch.setattr("soak.oracle.time.monotonic", lambda: 30.0)
    assert oracle.no_longer_refused() == []
    cause.ended = 29
    assert oracle.no_longer_refused() == ["ours"]
    assert oracle.no_longer_refused() == [], "once"


def test_only_a_fault_makes_a_request_late(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    oracle.causes.add(Cause("stall", of_source("s3"), 20, 30, texts=UNASKED))
    assert not oracle.may_be_late(asked(1, 19))
    assert oracle.may_be_late(asked(1, 21))
    assert not oracle.may_be_late(asked(1, 21, name="other", adapter=OTHER)), "it is served"


def test_the_time_in_which_a_503_is_allowed_counts(oracle: Oracle) -> None:
    oracle.of("ours").open(Claim.UNREGISTERED, 0)
    oracle.causes.add(Cause("gone", of_source("s3"), 2, 3))
    oracle.causes.add(Cause("disk full", DISK, 0, refusals=DISK_IS_FULL))
    oracle.down.open(0, 5)
    for at in (1, 2, 3, 4, 5):
        oracle.count_allowed(at)
    assert oracle.allowed_parts() == {"ours": 0.5}


def test_an_unknown_name_is_never_answered(bank: Bank, oracle: Oracle) -> None:
    nobody = asked(name="nobody-1", adapter=None)
    assert oracle.judge(nobody, Answer(404)) is None
    assert oracle.judge(nobody, Answer(503)) is not None
    assert "nobody has" in (oracle.judge(nobody, of(bank, OURS, 0)) or "")


def test_only_a_killed_server_may_break_answers(bank: Bank, oracle: Oracle) -> None:
    broken = Answer(500)
    assert oracle.judge(asked(1, 2), broken) is not None
    oracle.down.open(0, 1.5)
    oracle.down.close(0, 3)
    assert oracle.judge(asked(1, 2), broken) is None
    assert oracle.judge(asked(4, 5), broken) is not None
    assert oracle.judge(asked(1, 2), of(bank, OURS, 1)) is not None, "a wrong answer is wrong all the same"


def test_windows_open_and_close() -> None:
    windows = Windows()
    windows.open(1, 5)
    windows.close(1, 20)
    windows.close(1, 10)
    windows.close(1, 30)
    assert windows.history() == {"1": [[5, 10]]}
    windows.open(1, 10)
    assert windows.history() == {"1": [[5, math.inf]]}
    windows.close(1, 11)
    windows.open(1, 12)
    assert windows.during(11.5, 11.9) == set()
    assert windows.during(11.5, 12) == windows.during(0, 5) == {1}
    windows.forget(12)
    assert windows.history() == {"1": [[12, math.inf]]}
