"""True ranks: learned from what is written, forgotten while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lora_plugins.kernels.layers import watch
from lora_plugins.kernels.slot_ranks import SlotRanks, after_writing, at_once


def matrix(rank: int) -> SimpleNamespace:
    """A B of this rank."""
    return SimpleNamespace(shape=(100, rank))


def test_ranks_are_unknown_until_a_slot_is_written():
    ranks = SlotRanks(2, [16, 16])
    ranks.written(0, [4, 0])
    assert (ranks[0], ranks[1]) == ((4, 0), (16, 16))
    ranks.writing(0)
    assert ranks[0] == (16, 16)


def test_every_write_has_its_own_stamp_and_a_newer_version():
    ranks = SlotRanks(2, [16])
    seen = {ranks.stamp(0)}
    for step in (ranks.writing, lambda slot: ranks.written(slot, [4])) * 3:
        before, other = ranks.version, ranks.stamp(1)
        step(0)
        assert ranks.stamp(0) not in seen
        assert ranks.version > before
        assert ranks.stamp(1) == other
        seen.add(ranks.stamp(0))


def test_writes_from_two_threads_are_all_counted():
    ranks = SlotRanks(2, [16])
    threads = [threading.Thread(target=lambda n=n: [ranks.writing(n) for _ in range(5000)]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ranks.version == 10_000


@pytest.mark.parametrize("wrong", [[], [1, 1], [17], [-1]])
def test_ranks_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="slot 0"):
        SlotRanks(1, [16]).written(0, wrong)


class Layer:
    """A layer of slices with slots of rank 16; `expand` splits members that cover several slices."""

    def __init__(self, slices: int, expand: Callable[..., object] | None = None) -> None:
        self.lora_a_stacked = (torch.zeros(2, 1, 16, 8),) * slices
        self.lora_b_stacked = (torch.zeros(2, 1, 100, 16),) * slices
        if expand is not None:
            self.expand_packed_lora = expand

    def set_lora(self, index: int, lora_a: object, lora_b: object) -> None:
        pass

    reset_lora = set_lora


def written(layer: Layer, lora_b: object) -> tuple[int, ...]:
    """The ranks that are noted for this B; A has as many members."""
    noted = watch(layer).ranks
    layer.set_lora(0, lora_b, lora_b)
    return noted[0]


@pytest.mark.parametrize(
    ("lora_b", "slices", "expected"),
    [
        (matrix(4), 1, (4,)),
        ([matrix(4), None, matrix(8)], 3, (4, 0, 8)),
        ([None, None], 2, (0, 0)),
        (matrix(32), 1, (16,)),  # vLLM cuts what does not fit
        ([matrix(4)], 2, (16, 16)),  # fewer than slices, and nobody to ask how they are shared
    ],
)
def test_a_write_notes_the_rank_of_each_slice(lora_b, slices, expected):
    assert written(Layer(slices), lora_b) == expected


def test_a_pair_for_several_slices_is_expanded_by_the_layer():
    def expand(lora_a, lora_b):
        return tuple([side[0]] * 3 + [side[1]] for side in (lora_a, lora_b))

    assert written(Layer(4, expand), [matrix(4), None]) == (4, 4, 4, 0)


def test_what_follows_a_write_is_deferred_and_done_once():
    done = []
    after_writing("a", lambda: done.append("at once"))
    with at_once():
        after_writing("a", lambda: done.append("old"))
        after_writing("b", lambda: done.append("b"))
        with at_once():
            after_writing("a", lambda: done.append("new"))
        assert done == ["at once"]
        other = threading.Thread(target=after_writing, args=("a", lambda: done.append("other thread")))
        other.start()
        other.join()
        assert done == ["at once", "other thread"]
    assert done == ["at once", "other thread", "new", "b"]


def test_what_follows_a_write_is_done_after_an_error_too():
    done = []

    @at_once()
    def write() -> None:
        after_writing("a", lambda: done.append("a"))
        raise ValueError("no slot")

    with pytest.raises(ValueError, match="no slot"):
        write()
    assert done == ["a"]
    after_writing("a", lambda: done.append("b"))
    assert done == ["a", "b"]
