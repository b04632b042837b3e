"""Trained tokens: rows that replace those of the embedding and the head, judged before an engine has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import TokenPlaces
from lora_plugins.adapter.trained_token_places import token_rows
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import convert
from tests.adapter.verdicts import refusal
from tests.make import BASE, MODULES, PEFT, adapter_files, config_bytes, put, read_name, sharded, weights

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
PLACES = TokenPlaces(EMBEDDING, HEAD, words=32, features=8, most=4, is_tied=False)


def rows(count: int, features: int = 8, module: str = EMBEDDING, end: str = "") -> dict[str, np.ndarray]:
    name = f"{PEFT}{module}.token_adapter.trainable_tokens_delta{end}"
    return {name: np.random.default_rng(count).normal(size=(count, features)).astype("float32")}


def base(**changes: Any) -> Any:
    modules = replace(MODULES, tokens=msgspec.structs.replace(PLACES, **changes))
    return replace(BASE, model=Model(modules, read_name))


def judged(directory: Path, ids: object, tensors: dict[str, np.ndarray], **changes: Any) -> Any:
    files = adapter_files(weights() | tensors, trainable_token_indices=ids)
    return verify_adapter(put(directory / "adapter", files), base(**changes), Settings())


BOTH = {"embed_tokens": [3, 1], "lm_head": [7]}
OTHER_MODEL = r"serve it with the base model that it was trained on, or merge"


@pytest.mark.parametrize(
    ("ids", "tensors", "kind", "says"),
    [
        ([-1], rows(1), InvalidAdapter, r"trainable_token_indices \[-1\]; expected the ids of 1 to 16384 tokens"),
        ([3, 3], rows(2), InvalidAdapter, r"\[3, 3\]; expected .* each once"),
        ([1.0], rows(1), InvalidAdapter, "whole numbers from 0"),
        ([True], rows(1), InvalidAdapter, "whole numbers from 0"),
        ({"embed_tokens": []}, rows(1), InvalidAdapter, "1 to 16384 tokens"),
        ("3", rows(1), InvalidAdapter, "trainable_token_indices '3'"),
        ([3], {}, InvalidAdapter, "no rows of the trained tokens of 'the embedding'.*save the adapter again"),
        (BOTH, rows(2), InvalidAdapter, "no rows of the trained tokens of 'lm_head'"),
        ([3, 4], rows(3), InvalidAdapter, r"shape \[3, 8\]; expected one tensor of 2 rows.*same training run"),
        ([3], rows(1) | rows(1, end=".default"), InvalidAdapter, "two tensors 'token_adapter"),
        (None, rows(1), IncompatibleAdapter, "whose ids are not named.*give the configuration its"),
        ({"lm_head": [3]}, rows(1), IncompatibleAdapter, "whose ids are not named"),
        ([3, 32], rows(2), IncompatibleAdapter, f"token 32 trained .* expected ids below 32.*{OTHER_MODEL}"),
        ([3], rows(1, 9), IncompatibleAdapter, f"rows of 9 trained .* expected 8 features.*{OTHER_MODEL}"),
        ([1, 2, 3, 4, 5], rows(5), IncompatibleAdapter, "5 tokens trained .* expected at most 4"),
        ({"wpe": [3]}, rows(1, module="model.wpe"), IncompatibleAdapter, "embed_tokens' and 'lm_head', once each"),
        ({"embed_tokens": [3], "lm_head": [3]}, rows(1), IncompatibleAdapter, "expected rows of 'lm_head' too"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_cannot_replace_is_refused(
    tmp_path: Path, ids: object, tensors: dict[str, np.ndarray], kind: type[LoRAPluginsError], says: str
) -> None:
    refusal(tmp_path, weights() | tensors, base(), kind=kind, says=says, trainable_token_indices=ids)


def test_a_server_that_replaces_no_rows_says_why(tmp_path: Path) -> None:
    modules = replace(MODULES, without_tokens="as this model has 2 embeddings and 1 heads, not one")
    for served, says in (
        (replace(BASE, model=Model(modules, read_name)), "none, as this model has 2 embeddings.*merge the adapter"),
        (BASE, "as this server's workers replace no rows"),
    ):
        refusal(tmp_path, weights() | rows(1), served, says=says, trainable_token_indices=[3])


@pytest.mark.parametrize(
    ("ids", "tensors", "is_tied", "wanted"),
    [
        ([3, 1], rows(2), False, ((3, 1), None)),
        ([3, 1], rows(2), True, ((3, 1), (3, 1))),
        ({"model.embed_tokens": [3, 1]}, rows(2), False, ((3, 1), None)),
        (BOTH, rows(2) | rows(1, module=HEAD), False, ((3, 1), (7,))),
        (BOTH, rows(2) | rows(1, module=HEAD), True, ((3, 1), (7,))),
        ({"embed_tokens": [3], "lm_head": [3]}, rows(1), True, ((3,), (3,))),  # PEFT saves shared rows once
        ({"lm_head": [7]}, rows(1, module=HEAD), True, (None, (7,))),
        ([5], rows(1, module="model.language_model.embed_tokens"), False, ((5,), None)),
        ([5], rows(1, end=".default"), False, ((5,), None)),
    ],
    ids=str,
)
def test_a_tied_head_has_the_embeddings_rows(
    tmp_path: Path, ids: object, tensors: dict[str, np.ndarray], is_tied: bool, wanted: object
) -> None:
    found = judged(tmp_path, ids, tensors, is_tied=is_tied)
    model = base(is_tied=is_tied).model
    places = token_rows(found.weights.beside, found.config, model.modules, model.read)
    assert tuple(one and found.config.tokens_of(one.module) for one in places) == wanted
    assert all(one.tensor.name in tensors for one in places if one)


def test_rows_are_kept_where_pairs_are_converted(tmp_path: Path) -> None:
    tensors = {name.replace(".weight", ".default.weight"): value for name, value in weights().items()}
    own = rows(2, end=".default")
    verified, made, target = convert(tmp_path, tensors | own, base(), trainable_token_indices=[3, 1])
    assert verified.conversion.changes == ("keys renamed (4 modules)",)
    assert all(np.array_equal(made[name], own[name]) for name in own)
    assert parse_config((target / CONFIG_FILE).read_bytes()).token_ids == {"": (3, 1)}


def test_rows_in_several_files_become_one_file(tmp_path: Path) -> None:
    files = sharded(adapter_files(trainable_token_indices=[3]), weights() | rows(1))
    found = verify_adapter(put(tmp_path, files), base(), Settings())
    assert {one.name for one in found.conversion.kept} == {*weights(), *rows(1)}


@pytest.mark.parametrize("number", [np.nan, 1e6])
def test_rows_that_float16_cannot_hold_are_refused(tmp_path: Path, number: float) -> None:
    tensors = rows(1)
    next(iter(tensors.values()))[0, 0] = number
    says = r"(NaN or infinity|numbers up to 1e\+06) in .*trainable_tokens_delta"
    refusal(tmp_path, weights() | tensors, base(), says=says, trainable_token_indices=[3])


def test_ids_belong_to_the_module_that_ends_so() -> None:
    config = parse_config(config_bytes(trainable_token_indices={"embed_tokens": [3], "model.lm_head": [4]}))
    assert config.tokens_of("model.embed_tokens") == (3,)
    assert config.tokens_of("embed_tokens") == (3,)
    assert config.tokens_of("model.my_embed_tokens") == ()
    assert config.tokens_of("lm_head") == ()
