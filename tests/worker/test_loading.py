"""What is looked at before a parsed adapter counts as loaded, and whose memory it is in."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugins.adapter.model_modules import Kind, ModelModules, Place
from lora_plugins.errors import (
    AdapterNotFound,
    ErrorKind,
    IncompatibleAdapter,
    InvalidAdapter,
    NoFreeSlot,
    OutOfMemory,
    kind_of,
)
from lora_plugins.worker import loading
from lora_plugins.worker.host_memory import ALIGNMENT, Block, bytes_of, room


def weights(a: Any, b: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_a=a, lora_b=b, rank=4)


def model(**loras: Any) -> SimpleNamespace:
    return SimpleNamespace(loras=loras)


def module(*high: int, wide: int = 16, rank: int = 8) -> SimpleNamespace:
    """A module with one slot's A and B for each of its outputs."""
    return SimpleNamespace(
        output_slices=high,
        lora_a_stacked=tuple(torch.zeros(2, 1, rank, wide) for _ in high),
        lora_b_stacked=tuple(torch.zeros(2, 1, each, rank) for each in high),
    )


def modules_with(places: dict[str, Place]) -> ModelModules:
    return ModelModules("Tiny", "0.32.0", places)


def described(is_whole_model: bool = True, refuse_unmatched: bool = True, **loras: Any) -> tuple[str, ...]:
    """What is said of an adapter of these modules, where the model has one of 16 inputs and 32 outputs, called m."""
    manager = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=8), packed_modules={}, modules={})
    manager._restrict_to_local_experts = lambda name, parts: parts
    manager._get_lora_layer_weights = lambda model, name: model.loras.get(name)
    modules = modules_with({"m": Place("m", Kind.LINEAR, 16, 32), "q": Place("qkv", Kind.LINEAR, 16, 16)})
    return loading.check_described(
        model(**loras), manager, modules, is_whole_model=is_whole_model, refuse_unmatched=refuse_unmatched
    )


def pair(rank: int = 4, wide: int = 16, high: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rank, wide), torch.ones(high, rank)


def test_ranks_up_to_the_slots_fit() -> None:
    for rank, wide, high, said in (
        (1, 16, 32, None),
        (8, 16, 32, None),
        (9, 16, 32, "rank 9 in module 'm'; expected at most 8"),
        (4, 15, 32, "15 inputs and 32 outputs in module 'm'"),
        (4, 17, 32, "17 inputs and 32 outputs in module 'm'"),
        (4, 16, 31, "16 inputs and 31 outputs in module 'm'"),
        (4, 16, 33, "16 inputs and 33 outputs in module 'm'"),
    ):
        given = weights(*pair(rank, wide, high))
        for check, refusal in (
            (lambda given=given: described(m=given), said),
            (lambda given=given: loading.check_slot("m", module(32), given), said and "A and B of m"),
        ):
            with pytest.raises(IncompatibleAdapter, match=refusal) if refusal else contextlib.nullcontext():
                check()


def test_what_another_pipeline_stage_may_have_is_not_missed() -> None:
    loras = {name: weights(*pair()) for name in "myz"}
    with pytest.raises(IncompatibleAdapter, match="found 2 of 3 modules that the model does not have"):
        described(**loras)
    (note,) = described(**loras, refuse_unmatched=False)
    assert note.startswith("served without 2 of 3 modules")
    assert described(**loras, is_whole_model=False) == ()


def test_every_part_of_a_packed_module_is_looked_at() -> None:
    packed = module(16, 8, 8)
    q, k, v = pair(high=16), pair(high=8), pair(high=8)
    loading.check_slot("qkv", packed, weights([q[0], None, v[0]], [q[1], None, v[1]]))
    wrong = pair(high=16)
    with pytest.raises(IncompatibleAdapter, match=r"\(16, 4\)"):
        loading.check_slot("qkv", packed, weights([q[0], k[0], wrong[0]], [q[1], k[1], wrong[1]]))
    with pytest.raises(IncompatibleAdapter, match="another number of slices"):
        loading.check_slot("qkv", packed, weights([q[0], v[0]], [q[1], v[1]]))


def test_under_tensor_parallelism_the_shard_has_to_fit() -> None:
    sharded = module(16)
    sharded.tp_size, sharded.n_slices = 2, 1
    sharded.slice_lora_a = lambda a: a
    sharded.slice_lora_b = lambda b: b[:16]
    loading.check_slot("m", sharded, weights(*pair(high=32)))
    with pytest.raises(IncompatibleAdapter):
        loading.check_slot("m", sharded, weights(*pair(high=15)))


@pytest.mark.parametrize(
    "given",
    [weights(*pair(high=48)), weights([torch.ones(4, 16)] * 3, [torch.ones(16, 4)] * 3)],
    ids=["pair", "merged"],
)
def test_weights_of_an_undivided_module_are_judged_by_the_slot(given: Any) -> None:
    assert described(qkv=given) == ()
    manager = SimpleNamespace(modules={"qkv": module(16, 16, 8)}, _get_lora_layer_weights=lambda model, name: given)
    with pytest.raises(IncompatibleAdapter, match="of qkv"):
        loading.check_slots(None, manager, modules_with({"q": Place("qkv", Kind.LINEAR, 16, 16)}))


def test_slots_are_compared_where_only_the_engine_knows_the_sizes() -> None:
    places = {"known": Place("known", Kind.LINEAR, 16, 32), "fused": Place("fused", Kind.LINEAR, 16, None)}
    wrong = weights(*pair(high=31))
    manager = SimpleNamespace(
        modules=dict.fromkeys(("known", "fused"), module(32)),
        _get_lora_layer_weights=lambda model, name: model.get(name),
    )
    loading.check_slots({"fused": weights(*pair())}, manager, modules_with(places))
    loading.check_slots({"known": wrong}, manager, modules_with(places))
    with pytest.raises(IncompatibleAdapter, match="of fused"):
        loading.check_slots({"fused": wrong}, manager, modules_with(places))


def test_one_value_that_is_not_finite_is_found() -> None:
    for dtype, value in itertools.product((torch.float32, torch.float16, torch.bfloat16), ("nan", "inf", "-inf")):
        tensor = torch.randn(40, 33).to(dtype)
        good = model(m=weights([tensor, None], [tensor, None]), n=weights(tensor, torch.empty(0, 4)))
        loading.check_finite("sql", good)
        tensor[39, 32] = float(value)
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


def test_every_error_becomes_one_of_ours_and_names_the_adapter() -> None:
    for error, kind in (
        (NoFreeSlot("all leased"), NoFreeSlot),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (FileNotFoundError("adapter_config.json"), AdapterNotFound),
        (chained(ValueError("no adapter found"), FileNotFoundError("x")), AdapterNotFound),
        (ValueError("expected target modules in ..."), InvalidAdapter),
    ):
        explained = loading.explained(error, "sql")
        assert (type(explained), explained.adapter) == (kind, "sql"), error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_failing_file_system_is_no_broken_adapter(number: int) -> None:
    error = OSError(number, os.strerror(number))
    wrapped = ValueError("Loading lora sql failed")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        assert kind_of(loading.explained(one, "sql")) is ErrorKind.FAULT
