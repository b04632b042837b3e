"""What is looked at before a parsed adapter counts as loaded, and whose memory it is in."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from lora_plugins.errors import (
    AdapterNotFound,
    ErrorKind,
    InvalidAdapter,
    NoFreeSlot,
    OutOfMemory,
    kind_of,
)
from lora_plugins.worker import adapter_checks
from lora_plugins.worker.host_memory import ALIGNMENT, Block, bytes_of


def test_copy_into_a_block_is_contiguous_and_private() -> None:
    file = torch.arange(512.0)
    given = [file[:64].view(4, 16), file[64:192].view(4, 32).T, torch.empty(0, 4)]
    before = [tensor.clone() for tensor in given]
    block = Block(bytes_of(given))
    copies = [block.copy(tensor, scaling) for tensor, scaling in zip(given, (1, 2, 1), strict=True)]
    file.zero_()
    assert all(torch.equal(copy, by * one) for copy, by, one in zip(copies, (1, 2, 1), before, strict=True))
    assert all(copy.is_contiguous() and copy.data_ptr() % ALIGNMENT == 0 for copy in copies)


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
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "sql/adapter_model.safetensors/x"), AdapterNotFound),
        (ValueError("expected target modules in ..."), InvalidAdapter),
    ):
        explained = adapter_checks.explained(error, "sql")
        assert (type(explained), explained.adapter) == (kind, "sql"), error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_failing_file_system_is_no_broken_adapter(number: int) -> None:
    error = OSError(number, os.strerror(number))
    wrapped = ValueError("Loading lora sql failed")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        assert kind_of(adapter_checks.explained(one, "sql")) is ErrorKind.FAULT
