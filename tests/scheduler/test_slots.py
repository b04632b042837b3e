from __future__ import annotations

from lora_plugins.scheduler.slots import Slots


def test_each_owner_has_a_slot_of_its_own() -> None:
    slots = Slots(3)
    assert sorted(slots.acquire(engine_id) for engine_id in (7, 8, 9)) == [0, 1, 2]
    assert not slots.has_free
    assert len(slots) == 3


def test_a_released_slot_is_acquired_again() -> None:
    slots = Slots(1)
    slots.acquire(7)
    slots.release(7)
    slots.release(7)
    assert slots.has_free
    assert slots.acquire(8) == 0


def test_owners_come_in_the_order_of_their_last_use() -> None:
    slots = Slots(3)
    for engine_id in (7, 8, 9):
        slots.acquire(engine_id)
    slots.used(7)
    assert list(slots.owners()) == [8, 9, 7]
