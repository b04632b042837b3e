from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.scheduler.waiting import WaitingOrder


def order(*entries: tuple[int, float, int], max_wait_s: float = 1.0) -> WaitingOrder:
    waiting = WaitingOrder(max_wait_s)
    for engine_id, since, count in entries:
        waiting.put(engine_id, since, count)
    return waiting


def test_the_most_held_goes_first() -> None:
    assert order((1, 0.0, 1), (2, 0.5, 3), (3, 0.2, 2)).first(0.6) == 2


def test_who_has_waited_too_long_goes_before_the_most_held() -> None:
    waiting = order((1, 0.0, 1), (2, 0.5, 3))
    assert waiting.first(0.99) == 2
    assert waiting.first(1.0) == 1


def test_those_left_out_are_passed_over_even_when_overdue() -> None:
    waiting = order((1, 0.0, 1), (2, 0.1, 1), (3, 0.2, 5))
    assert waiting.first(9.0, {1}) == 2
    assert waiting.first(9.0, {1, 2, 3}) is None


def test_a_better_priority_goes_before_age_and_count() -> None:
    waiting = order((1, 0.0, 9))
    waiting.put(2, 5.0, 1, priority=-1)
    assert waiting.first(6.0) == 2
    assert waiting.first(6.0, {2}) == 1


def test_next_overdue_is_the_first_that_is_not_yet() -> None:
    waiting = order((1, 0.0, 1), (2, 0.5, 1), (3, 0.7, 1))
    assert waiting.next_overdue_at(1.2) == 1.5
    assert waiting.next_overdue_at(2.0) is None


def test_an_empty_order_has_no_first() -> None:
    waiting = order((1, 0.0, 1))
    waiting.remove(1)
    waiting.remove(1)
    assert waiting.first(0.0) is None
    assert len(waiting) == 0


def test_among_the_oldest_counts_who_came_before() -> None:
    waiting = order((1, 0.0, 1), (2, 0.5, 1))
    assert waiting.is_among_oldest(3, 0.6, 3)
    assert not waiting.is_among_oldest(3, 0.6, 2)
    assert waiting.is_among_oldest(0, 0.5, 2)


CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.0, 1.0, 2.0]), st.integers(0, 3), st.integers(0, 1), st.booleans()),
    max_size=30,
)


@given(changes=CHANGES, now=st.sampled_from([0.0, 1.0, 2.0, 3.0]), but=st.sets(st.integers(1, 6)))
def test_first_is_what_sorting_everybody_would_find(changes, now, but) -> None:
    waiting, entries = WaitingOrder(1.0), {}
    for engine_id, since, count, priority, is_removed in changes:
        if is_removed:
            waiting.remove(engine_id)
            entries.pop(engine_id, None)
        else:
            waiting.put(engine_id, since, count, priority)
            entries[engine_id] = (priority, since, count)
    assert len(waiting) == len(entries)

    def rank(engine_id: int) -> tuple[float, ...]:
        priority, since, count = entries[engine_id]
        is_overdue = since <= now - 1.0
        return (priority, 0, since) if is_overdue else (priority, 1, -count)

    found = waiting.first(now, but)
    candidates = entries.keys() - but
    assert (found is None) == (not candidates)
    if found is not None:
        assert rank(found) == min(map(rank, candidates))
