"""What is looked at before a parsed adapter counts as loaded, and whose memory it is in."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.adapter.landing import mismatch
from lora_plugins.adapter.model_modules import ModelModules, Place
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, NoFreeSlot, OutOfMemory
from lora_plugins.worker import loading
from lora_plugins.worker.host_memory import ALIGNMENT, Block, bytes_of, room


def weights(a: Any, b: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_a=a, lora_b=b)


def model(**loras: Any) -> SimpleNamespace:
    return SimpleNamespace(loras=loras)


def module(*high: int, wide: int = 16, rank: int = 8) -> SimpleNamespace:
    """A module with one slot's A and B for each of its outputs."""
    return SimpleNamespace(
        output_slices=high,
        lora_a_stacked=tuple(torch.zeros(2, 1, rank, wide) for _ in high),
        lora_b_stacked=tuple(torch.zeros(2, 1, each, rank) for each in high),
    )


def pair(rank: int = 4, wide: int = 16, high: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rank, wide), torch.ones(high, rank)


@pytest.mark.parametrize(("rank", "fits"), [(1, True), (4, True), (8, True), (9, False)])
def test_any_rank_up_to_the_slots_fits(rank: int, fits: bool) -> None:
    refused = False
    try:
        loading.check_fits("a", "m", module(32), weights(*pair(rank)))
    except IncompatibleAdapter:
        refused = True
    assert refused is not fits


@pytest.mark.parametrize(
    ("rank", "wide", "high", "said"),
    [
        (9, 16, 32, "rank 9 and 16 features; expected rank up to 8 and 16"),
        (4, 15, 32, "lora_A of m with rank 4 and 15"),
        (4, 17, 32, "lora_A of m with rank 4 and 17"),
        (4, 16, 31, "lora_B of m with rank 4 and 31"),
        (4, 16, 33, "lora_B of m with rank 4 and 33"),
    ],
)
def test_what_does_not_fit_is_refused(rank: int, wide: int, high: int, said: str) -> None:
    with pytest.raises(IncompatibleAdapter, match=said) as caught:
        loading.check_fits("sql", "m", module(32), weights(*pair(rank, wide, high)))
    assert caught.value.adapter == "sql"


def test_every_part_of_a_packed_module_is_looked_at() -> None:
    packed = module(16, 8, 8)
    q, k, v = pair(high=16), pair(high=8), pair(high=8)
    loading.check_fits("a", "qkv", packed, weights([q[0], None, v[0]], [q[1], None, v[1]]))
    wrong = pair(high=16)
    with pytest.raises(IncompatibleAdapter, match="16 features"):
        loading.check_fits("a", "qkv", packed, weights([q[0], k[0], wrong[0]], [q[1], k[1], wrong[1]]))
    with pytest.raises(InvalidAdapter, match="nothing"):
        loading.check_fits("a", "qkv", packed, weights([q[0], None, v[0]], [q[1], k[1], v[1]]))


def test_under_tensor_parallelism_the_shard_has_to_fit() -> None:
    sharded = module(16)
    sharded.tp_size = 2
    sharded.slice_lora_a = lambda a: a
    sharded.slice_lora_b = lambda b: b[:16]
    loading.check_fits("a", "m", sharded, weights(*pair(high=32)))
    with pytest.raises(IncompatibleAdapter):
        loading.check_fits("a", "m", sharded, weights(*pair(high=15)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(4, 16), torch.ones(32, 3)),
        (torch.ones(4, 16, 1), torch.ones(32, 4)),
        (torch.ones(16), torch.ones(32, 4)),
        (None, torch.ones(32, 4)),
        (torch.ones(4, 16), None),
    ],
)
def test_what_is_no_pair_of_matrices_is_refused(a: Any, b: Any) -> None:
    with pytest.raises(InvalidAdapter, match="lora_A and lora_B of m"):
        loading.check_fits("a", "m", module(32), weights(a, b))


def test_what_matches_nothing_is_named() -> None:
    x, y, z = (weights(*pair()) for _ in range(3))
    adapter = model(x=x, z=z, y=y)
    assert loading.unmatched_modules(adapter, {"layers.x": x}) == ["y", "z"]
    assert loading.unmatched_modules(adapter, {"layers.x": x, "layers.y": y, "layers.z": z}) == []
    known = [f"layers.{name}" for name in "pqrs"]
    modules = ModelModules("Tiny", "0.32.0", {name: Place(name) for name in known})
    error = mismatch(["y", "z"], 3, modules, adapter="sql")
    assert str(error) == (
        "[L003] adapter 'sql': found 2 of 3 modules that the model does not have, such as 'y', 'z'; expected modules "
        "of the model, such as 'layers.p', 'layers.q', 'layers.r'. To fix: serve it with the base model that it was "
        "trained on, or set LORA_PLUGINS_UNMATCHED=warn."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    tensor = torch.randn(40, 33).to(dtype)
    good = model(m=weights([tensor, None], [tensor, None]), n=weights(tensor, torch.empty(0, 4)))
    loading.check_finite("sql", good)
    tensor[39, 32] = value
    with pytest.raises(InvalidAdapter, match="weights of m"):
        loading.check_finite("sql", good)


def test_copy_into_a_block_is_contiguous_and_private() -> None:
    file = torch.arange(512.0)
    given = [file[:64].view(4, 16), file[64:192].view(4, 32).T, torch.empty(0, 4)]
    before = [tensor.clone() for tensor in given]
    block = Block(bytes_of(given))
    copies = [block.copy(tensor, scaling) for tensor, scaling in zip(given, (1, 2, 1), strict=True)]
    file.zero_()
    assert all(torch.equal(copy, by * one) for copy, by, one in zip(copies, (1, 2, 1), before, strict=True))
    assert all(copy.is_contiguous() and copy.data_ptr() % ALIGNMENT == 0 for copy in copies)


def test_a_block_is_handed_out_piece_by_piece() -> None:
    block = Block(room(10) + room(100))
    first, second = block.acquire(10), block.acquire(100)
    assert (first.numel(), second.numel(), second.data_ptr() - first.data_ptr()) == (10, 100, room(10))


def test_the_next_adapter_gets_the_memory_of_the_last() -> None:
    """So a full host cache maps and unmaps nothing; but not memory of another size."""
    block = Block(1 << 20)
    address = block.acquire(1).data_ptr()
    del block
    gc.collect()
    assert Block(1 << 10).acquire(1).data_ptr() != address, "much too large: it is released to the system"
    again = Block(1 << 20)
    address = again.acquire(1).data_ptr()
    piece = again.acquire(64)
    del again
    gc.collect()
    assert Block(1 << 20).acquire(1).data_ptr() != address, "a piece of it is still used"
    del piece
    gc.collect()
    assert Block(1_000_000).acquire(1).data_ptr() == address


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoFreeSlot("all leased"), NoFreeSlot),
        (MemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (FileNotFoundError("adapter_config.json"), AdapterNotFound),
        (chained(ValueError("no adapter found"), FileNotFoundError("x")), AdapterNotFound),
        (ValueError("expected target modules in ..."), InvalidAdapter),
        (KeyboardInterrupt(), InvalidAdapter),
    ],
)
def test_every_error_becomes_one_of_ours_and_names_the_adapter(error: BaseException, kind: type) -> None:
    explained = loading.explained(error, "sql")
    assert type(explained) is kind
    assert explained.adapter == "sql"
