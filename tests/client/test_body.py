"""Bodies of pushes arrive as the trainer's tensors and files are."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import load as torch_load

from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.client.body import archive_of, body_of
from tests.make import CHAT, adapter_files, put

_W = np.arange(12.0, dtype=np.float32).reshape(3, 4)
_TENSOR = torch.from_numpy(_W.copy())


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": _W, "b": _W.T, "c": _W[:, ::2], "d": np.asfortranarray(_W), "e": _W.astype(">f4"), "f": _W[0, 0] * _W},
        {"a": _TENSOR, "b": _TENSOR, "c": _TENSOR.T, "d": _TENSOR[1:]},
        {"a": _W.T, "b": _TENSOR, "c": _W[::-1], "d": _W.astype(">f4")},
        {"a": torch._neg_view(_TENSOR), "b": torch.complex(_TENSOR, _TENSOR).conj(), "c": _TENSOR[:0]},
    ],
    ids=["numpy", "torch", "both", "views"],
)
def test_tensors_arrive_whatever_their_memory_and_kind(tensors: dict[str, np.ndarray | torch.Tensor]) -> None:
    arrived = load(body_of(tensors, {"r": 1})[0])
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        whole = tensor.resolve_conj().resolve_neg() if isinstance(tensor, torch.Tensor) else tensor
        np.testing.assert_array_equal(arrived[name], np.asarray(whole))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensors_of_kinds_without_numpy_arrive(kind: torch.dtype) -> None:
    sent = {"a": _TENSOR.to(kind), "b": _TENSOR.to(kind).T, "c": _TENSOR.to(kind)[:, ::2]}
    arrived = torch_load(body_of(sent, {"r": 1})[0])
    assert {name: (it.dtype, it.float().tolist()) for name, it in arrived.items()} == {
        name: (kind, it.float().tolist()) for name, it in sent.items()
    }


@pytest.mark.parametrize("tensor", [torch.empty(3, 4, device="meta"), _TENSOR.to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_memory_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tensor 'layer' has no memory here"):
        body_of({"layer": tensor}, {"r": 1})


def test_files_for_chats_are_sent_and_no_others(tmp_path: Path) -> None:
    assert {*CHAT} == {*CHAT_FILES}  # the client may not import servers' parts, and has the names itself
    files = {**adapter_files(), **CHAT}
    put(tmp_path, {**files, "vocab.json": b"{}", "optimizer.pt": b"x"})
    with tarfile.open(fileobj=io.BytesIO(archive_of(tmp_path)[0])) as tar:
        assert {it.name for it in tar} == {*files}


def test_linked_files_are_sent_as_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "adapter_config.json").symlink_to("blob")
    with tarfile.open(fileobj=io.BytesIO(archive_of(tmp_path)[0])) as tar:
        assert [(it.name, it.isfile()) for it in tar] == [("adapter_config.json", True)]
