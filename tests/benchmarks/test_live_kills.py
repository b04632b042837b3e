"""What the trials with kill -9 count as wrong: `benchmarks/live/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live.kills import RIGHT, Found, Versions, bounds, judged


@pytest.mark.parametrize(
    ("number", "tokens", "what"),
    [
        (3, [3], RIGHT),
        (4, [4], RIGHT),
        (4, [3], "other tokens than PEFT's for its digest"),
        (2, [2], "of version 2, and not of 3 to 4"),
        (5, [5], "of version 5, and not of 3 to 4"),
        (None, [3], "of no version that was pushed"),
    ],
)
def test_only_old_or_new_with_its_own_tokens_is_right(number: int | None, tokens: list[int], what: str) -> None:
    assert judged(number, tokens, (3, 4), lambda number: [number]) == what


def test_the_journal_of_a_killed_trainer_bounds_the_versions(tmp_path: Path) -> None:
    journal = tmp_path / "journal.txt"
    for text, expected in (("", (-1, -1)), ("begun 0\n", (-1, 0)), ("begun 0\nanswered 0\nbegun 1\n", (0, 1))):
        journal.write_text(text)
        assert bounds(journal) == expected


def test_a_digest_is_of_the_push_whose_number_it_holds(tmp_path: Path) -> None:
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "adapter_config.original.json").write_text('{"r": 8, "number": 7}')
    versions = Versions(tmp_path)
    assert (versions.number_of("abc"), versions.number_of("def"), versions.number_of("")) == (7, None, None)


def test_errors_count_as_wrong_but_after_a_server_is_killed() -> None:
    found = Found()
    found.note(RIGHT)
    found.note("no answer: ReadError", may_be=True)
    assert found.wrong == []
    found.note("no answer: ReadError")
    assert (found.wrong, found.counts) == (["no answer: ReadError"], {RIGHT: 1, "no answer: ReadError": 2})
