"""Adapters' files are read as the safetensors library reads them, and nothing of a read is left behind."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lora_plugins.worker.weights_file import MappedTensors, open_weights, patch_safetensors
from tests.worker.small_model import Adapter, Make

READS = 200


def blocks_left_by(work: Callable[[], object]) -> int:
    """Python's blocks of memory that `READS` calls leave allocated."""
    for _ in range(20):
        work()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(READS):
        work()
    gc.collect()
    return sys.getallocatedblocks() - before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "w.safetensors"
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 7), "b": (1,), "c": (3, 5, 2), "d": (129, 1)}
    save_file({name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}, path)
    expected = load_file(path)
    with open_weights(path, framework="pt") as file:
        assert isinstance(file, MappedTensors)
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping, as safe_open is none
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)


def test_bytes_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 + -len(header) % 4)
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert open_weights(path).get_tensor("t").tolist() == [1.5, -2.0]


def test_a_tensor_outlives_its_file_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"t": torch.ones(2, 2)}, path)
    with open_weights(path) as file:
        tensor = file.get_tensor("t")
    del file
    tensor.mul_(3)
    assert load_file(path)["t"].tolist() == [[1, 1], [1, 1]]
    path.unlink()
    gc.collect()
    assert tensor.tolist() == [[3, 3], [3, 3]]


def test_a_dtype_that_adapters_lack_is_left_to_the_library(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"t": torch.arange(5)}, path)
    with open_weights(path) as file:
        assert file.get_tensor("t").tolist() == [0, 1, 2, 3, 4]


def test_a_broken_file_is_refused_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"t": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SafetensorError):
        open_weights(path)
    with pytest.raises(FileNotFoundError):
        open_weights(tmp_path / "none.safetensors")


def test_loading_an_adapter_again_and_again_leaves_nothing_behind(
    make_manager: Make, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself leaves two integers for each tensor: this one has 36, so 14,400 in 200 loads."""
    from vllm.lora import lora_model

    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)  # to be put back
    patch_safetensors()
    manager = make_manager()
    adapter = adapters[0]
    tensors = len(adapter.a) + len(adapter.b)
    assert blocks_left_by(lambda: manager._load_adapter(adapter.request())) < READS * tensors / 10
