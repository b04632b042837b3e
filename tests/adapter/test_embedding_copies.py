"""Copies of the base model's embeddings in an adapter: the base model's own, widened too, or said to be others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.settings import BaseMatch, Settings
from tests.make import BASE, PEFT, adapter_files, put

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
WORDS, FEATURES = 1200, 8  # more rows than are compared at once
DIFFERS, UNKNOWN = "differs from", "could not be compared with"


def rows(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(WORDS, FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)


def changed(row: int) -> torch.Tensor:
    found = rows()
    found[row, 3] += 1
    return found


def warned(directory: Path, base: dict[str, dict[str, torch.Tensor]] | str, **copies: torch.Tensor) -> Any:
    """The warnings of an adapter with these copies, on a base model of these files."""
    from safetensors.torch import load_file

    adapter = put(directory / "adapter", adapter_files())
    names = {"embedding": EMBEDDING, "head": HEAD}
    more = {f"{PEFT}{names[name]}.base_layer.weight": tensor for name, tensor in copies.items()}
    save_file(load_file(adapter / "adapter_model.safetensors") | more, adapter / "adapter_model.safetensors")
    if not isinstance(base, str):
        (directory / "base").mkdir()
        for file, tensors in base.items():
            save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, directory / "base" / file)
        base = str(directory / "base")
    model = replace(BASE.model, modules=replace(BASE.model.modules, vocabulary=WORDS))
    settings = Settings(base_match=BaseMatch.OFF)
    return verify_adapter(adapter, replace(BASE, path=base, model=model), settings).warnings


def said(module: str, how: str) -> str:
    return f"not used of the adapter: {PEFT}{module}.base_layer.weight, which {how} the base model's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_base_models_own_embeddings_are_not_warned_of(tmp_path: Path, dtype: torch.dtype) -> None:
    base = {"model-1.safetensors": {EMBEDDING: rows(1)}, "model-2.safetensors": {HEAD: rows(), "model.norm": rows(2)}}
    assert warned(tmp_path, base, embedding=rows(1).to(dtype), head=rows().to(dtype)) == ()


def test_a_head_of_shared_weights_is_the_embeddings(tmp_path: Path) -> None:
    assert warned(tmp_path, {"model.safetensors": {f"language_model.{EMBEDDING}": rows()}}, head=rows()) == ()


@pytest.mark.parametrize("other", [changed(0), changed(WORDS - 1), rows(9), rows(dtype=torch.float32)])
def test_one_number_that_differs_is_said_by_name(tmp_path: Path, other: torch.Tensor) -> None:
    base = {"model.safetensors": {EMBEDDING: rows(1), HEAD: rows()}}
    assert warned(tmp_path, base, embedding=rows(1), head=other) == (said(HEAD, DIFFERS),)


def test_narrowed_and_padded_embeddings_differ(tmp_path: Path) -> None:
    base = {"model.safetensors": {EMBEDDING: torch.cat([rows(), rows()[:4]]), HEAD: rows(dtype=torch.float32)}}
    wanted = {said(EMBEDDING, DIFFERS), said(HEAD, DIFFERS)}
    assert {*warned(tmp_path, base, embedding=rows(), head=rows())} == wanted


@pytest.mark.parametrize(
    "base",
    [
        {},
        {"model.safetensors": {"model.norm": rows()}},
        {"model.safetensors": {HEAD: rows().to(torch.float8_e4m3fn)}},
        "org/a-model-that-no-cache-has",
        "/no/such/folder",
    ],
    ids=["no files", "other names", "quantised", "not in the cache", "no folder"],
)
def test_a_base_model_that_cannot_be_read_is_said(tmp_path: Path, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({f"{HEAD}.weight": rows()}, "other.safetensors")
    assert warned(tmp_path, base, head=rows()) == (said(HEAD, UNKNOWN),)


def test_a_base_model_of_the_hubs_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    put(snapshot.parents[1] / "refs", {"main": b"a" * 40})
    put(snapshot, {"config.json": b"{}"})
    save_file({f"{HEAD}.weight": rows()}, snapshot / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert warned(tmp_path, "org/model", head=rows()) == ()
    assert warned(tmp_path / "other", "org/model", head=changed(5)) == (said(HEAD, DIFFERS),)
