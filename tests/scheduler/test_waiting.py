from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.scheduler.adapter import Adapter, Held
from lora_plugins.scheduler.stats import FoundIn
from lora_plugins.scheduler.waiting_order import WaitingOrder
from tests.scheduler.simulated import spec


def waiting_adapter(key: int, at: float, priority: int = 0) -> Adapter:
    adapter = Adapter(spec(key), key)
    adapter.hold(f"r{key}", Held(None, at, FoundIn.STORE, (1, priority, at, "")))
    return adapter


def order(*adapters: Adapter) -> WaitingOrder:
    waiting = WaitingOrder()
    for adapter in adapters:
        waiting.keep(adapter, is_in=True)
    return waiting


def test_count_before_counts_who_would_be_served_first() -> None:
    waiting = order(waiting_adapter(1, 0.0), waiting_adapter(2, 0.5))
    assert waiting.count_before(waiting_adapter(3, 0.6)) == 2
    assert waiting.count_before(waiting_adapter(0, 0.5)) == 1
    assert waiting.count_before(waiting_adapter(3, 0.6, priority=-1)) == 0


CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.0, 1.0, 2.0]), st.integers(0, 1), st.booleans()), max_size=30
)


@given(changes=CHANGES)
def test_the_order_is_what_sorting_all_would_find(changes) -> None:
    adapters = {key: Adapter(spec(key), key) for key in range(1, 7)}
    waiting, entries = WaitingOrder(), {}
    for key, at, priority, is_removed in changes:
        if is_removed:
            waiting.keep(adapters[key], is_in=False)
            entries.pop(key, None)
        else:
            for request_id in list(adapters[key].held):
                adapters[key].unhold(request_id)
            adapters[key].hold("r", Held(None, at, FoundIn.STORE, (1, priority, at, "")))
            waiting.keep(adapters[key], is_in=True)
            entries[key] = (priority, at, key)
    assert len(waiting) == len(entries)
    assert set(entries) == {key for key in adapters if adapters[key] in waiting}
    assert [adapter.key for adapter in waiting] == [entry[2] for entry in sorted(entries.values())]
