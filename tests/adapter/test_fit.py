"""The served base model: by which names adapters may know it, and which ranks fit; modules are in test_landing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.fit import BaseModel, check_base
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError
from lora_plugins.settings import BaseMatch
from tests.make import BASE, LAYER, PEFT

SNAPSHOT = "/home/someone/.cache/huggingface/hub/models--org--tiny/snapshots/" + "0123456789abcdef" * 2 + "01234567"
Q, V = LAYER.format(0, "q_proj"), LAYER.format(0, "v_proj")


def base(path="org/tiny", **changes) -> BaseModel:
    return dataclasses.replace(BASE, path=path, served_names=("served",), **changes)


def adapter(name: str | None = "org/tiny", rank: int = 4, **changes) -> AdapterConfig:
    return AdapterConfig(rank=rank, alpha=8.0, targets=None, base_model=name, **changes)


def lora(module: str = Q, wide: int = 8, high: int = 8, rank: int = 4, prefix: str = PEFT) -> LoraPair:
    a, b = (f"{prefix}{module}.lora_{side}.weight" for side in "AB")
    return LoraPair(module, TensorInfo(a, "F32", (rank, wide), 0, 0), TensorInfo(b, "F32", (high, rank), 0, 0), rank, 8)


def check(name="org/tiny", *, mode=BaseMatch.COMPATIBLE, served=None, pairs=None, **changes):
    return check_base(adapter(name, **changes), Weights(tuple(pairs or [lora()])), served or base(), mode)


# --- names


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("org/tiny", "org/tiny"),
        ("org/tiny", "Org/Tiny"),  # the Hub does not tell them apart
        ("org/tiny", "served"),
        ("org/tiny", "org/tiny/"),
        ("org/tiny", SNAPSHOT),
        ("org/tiny", SNAPSHOT + "/"),
        ("org/tiny", "/data/models/tiny"),
        (SNAPSHOT, "org/tiny"),
        (SNAPSHOT, "/data/models/tiny"),
        (SNAPSHOT, SNAPSHOT.replace("0123", "fedc")),  # another snapshot of the same model
        ("/data/models/tiny", "org/tiny"),
        ("/data/models/tiny/", "/data/models/tiny"),
        ("/data/models/tiny", "/elsewhere/tiny"),
        ("/data/models/tiny", "/data/./models/x/../tiny"),
        ("./tiny", "tiny"),
    ],
)
def test_a_model_matches_these_names(served, name):
    assert base(served).matches(name)


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("org/tiny", "org/small"),
        ("org/tiny", "other/tiny"),  # another model on the Hub
        ("org/tiny", SNAPSHOT.replace("org", "other")),
        (SNAPSHOT, "other/tiny"),
        ("org/tiny", "/data/models/small"),
        ("/data/models/tiny", "/data/models/tiny-2"),
        ("/data/models/tiny", "/"),
        ("org/tiny", ""),
        ("org/tiny", "///"),
        (SNAPSHOT, SNAPSHOT.rsplit("/", 1)[1]),
    ],
)
def test_a_model_does_not_match_these_names(served, name):
    assert not base(served).matches(name)


def test_a_symlink_is_the_directory_it_points_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert base(str(tmp_path / "real")).matches(str(tmp_path / "link"))


def test_exact_names_are_path_served_names_and_aliases():
    model = base(aliases=("other/alias",))
    assert model.names == ("org/tiny", "served", "other/alias")
    assert model.matches("other/alias")
    assert not base().matches("other/alias")


# --- modes


def test_strict_takes_exact_names_only():
    assert check("served", mode=BaseMatch.STRICT) == ()
    for name in ("Org/Tiny", SNAPSHOT, "other/model"):
        with pytest.raises(IncompatibleAdapter) as caught:
            check(name, mode=BaseMatch.STRICT)
        assert name in caught.value.found
        assert caught.value.expected == "org/tiny or served"


def test_strict_takes_an_alias_and_refuses_a_missing_name():
    assert check("x", mode=BaseMatch.STRICT, served=base(aliases=("x",))) == ()
    with pytest.raises(IncompatibleAdapter, match="not named"):
        check(None, mode=BaseMatch.STRICT)


@pytest.mark.parametrize("name", ["org/tiny", "Org/Tiny", SNAPSHOT, "served", "/x/tiny"])
def test_compatible_takes_a_known_name_without_a_note(name):
    assert check(name) == ()


def test_compatible_takes_another_name_by_its_shapes_and_says_so():
    assert check("other/model") == (
        "names base model 'other/model', served is 'org/tiny'; accepted because every shape fits",
    )
    assert "names no base model" in check(None)[0]


def test_compatible_refuses_another_name_where_shapes_cannot_be_compared():
    unknown_shapes = base(model=None)
    assert check("org/tiny", served=unknown_shapes) == ()
    for name in ("other/model", None):
        with pytest.raises(IncompatibleAdapter, match="cannot be compared"):
            check(name, served=unknown_shapes)
        with pytest.raises(IncompatibleAdapter, match="cannot be compared"):
            check_base(adapter(name), None, base(), BaseMatch.COMPATIBLE)
    assert check_base(adapter("org/tiny"), None, base(), BaseMatch.COMPATIBLE) == ()


@pytest.mark.parametrize("name", ["other/model", None])
def test_off_takes_any_name(name):
    assert check(name, mode=BaseMatch.OFF) == ()
    assert check(name, mode=BaseMatch.OFF, served=base(model=None)) == ()


# --- rank


@pytest.mark.parametrize("mode", BaseMatch)
def test_a_rank_above_the_servers_is_refused_in_every_mode(mode):
    assert check(rank=16, mode=mode) == ()
    with pytest.raises(IncompatibleAdapter, match=r"rank 17.*at most 16"):
        check(rank=17, mode=mode)
    with pytest.raises(IncompatibleAdapter, match="rank 17"):
        check(rank_pattern={"k_proj": 17}, mode=mode)


def test_an_unknown_largest_rank_limits_nothing():
    assert check(rank=1000, served=base(max_rank=None)) == ()


@pytest.mark.parametrize(("rank", "slot"), [(17, 32), (33, 64), (65, 128), (257, 320), (512, 512)])
def test_the_remedy_is_a_rank_that_vllm_takes(rank, slot):
    with pytest.raises(IncompatibleAdapter) as caught:
        check(rank=rank)
    assert caught.value.remedy == f"restart the server with --max-lora-rank {slot}"


# --- modules


@pytest.mark.parametrize("mode", BaseMatch)
def test_modules_must_be_the_models_in_every_mode(mode):
    for pair in (lora(Q, 16, 8), lora("encoder.layers.0.self_attn.q_proj")):
        with pytest.raises(IncompatibleAdapter, match=pair.module):
            check(mode=mode, pairs=[lora(), pair])


def test_what_is_left_out_is_noted_beside_another_name():
    pairs = Weights((lora(), lora("encoder.q_proj")))
    served = check_base(adapter("other/model"), pairs, base(), BaseMatch.COMPATIBLE, refuse_unmatched=False)
    assert "served without 1 of 2 modules" in served[0]
    assert served[1].endswith("accepted because the rest fits")


def test_a_server_without_lora_says_so_first():
    with pytest.raises(IncompatibleAdapter, match="--enable-lora"):
        check("other", rank=1000, served=base(lora_enabled=False))


@given(st.text(max_size=40), st.sampled_from(BaseMatch), st.text(max_size=20))
def test_any_name_and_module_fit_or_raise_our_errors(name, mode, module):
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        return  # `parse_config` lets no such name through
    try:
        said = check(name, mode=mode, pairs=[lora(module)])
    except LoRAPluginsError as error:
        said = (error.found, error.expected, error.remedy)
    assert all(said)
    assert BaseModel(name).matches(name)
