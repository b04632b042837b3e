from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.scheduler.waiting import WaitingOrder


def order(*entries: tuple[int, float]) -> WaitingOrder:
    waiting = WaitingOrder()
    for engine_id, since in entries:
        waiting.put(engine_id, since)
    return waiting


def test_first_come_is_first_served() -> None:
    assert order((1, 0.5), (2, 0.0), (3, 0.2)).first() == 2


def test_a_better_priority_goes_before_an_earlier_arrival() -> None:
    waiting = order((1, 0.0))
    waiting.put(2, 5.0, priority=-1)
    assert waiting.first() == 2
    assert waiting.first({2}) == 1


def test_count_before_counts_who_would_be_served_first() -> None:
    waiting = order((1, 0.0), (2, 0.5))
    assert waiting.count_before(3, 0.6) == 2
    assert waiting.count_before(0, 0.5) == 1
    assert waiting.count_before(3, 0.6, priority=-1) == 0


CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.0, 1.0, 2.0]), st.integers(0, 1), st.booleans()), max_size=30
)


@given(changes=CHANGES, but=st.sets(st.integers(1, 6)))
def test_first_is_what_sorting_all_would_find(changes, but) -> None:
    waiting, entries = WaitingOrder(), {}
    for engine_id, since, priority, is_removed in changes:
        if is_removed:
            waiting.remove(engine_id)
            entries.pop(engine_id, None)
        else:
            waiting.put(engine_id, since, priority)
            entries[engine_id] = (priority, since, engine_id)
    assert len(waiting) == len(entries)
    assert set(entries) == {engine_id for engine_id in range(1, 7) if engine_id in waiting}
    assert waiting.first(but) == min((entries[key] for key in entries.keys() - but), default=(0, 0, None))[2]
