"""Experts stacked and one by one compute the same after the conversion, in either direction."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import product

import numpy as np
import pytest

from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.landing import Model
from lora_plugins.adapter.model_modules import ExpertFormat
from lora_plugins.adapter.patterns import PatternBudget
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import Settings
from tests.adapter.expert_models import BLOCK, HIDDEN, INNER, NAMES, sizes_of, with_experts
from tests.adapter.layouts.converted import convert, delta
from tests.adapter.verdicts import refusal
from tests.make import BASE, PEFT, adapter_files, config_bytes, pair, put, read_name

COUNT, RANK = 3, 2
SIZES = sizes_of()


def base_of(kind: ExpertFormat, names: dict[str, str] = NAMES, *, is_interleaved: bool = False):
    modules = with_experts(kind, count=COUNT, inner=INNER, names=names, is_interleaved=is_interleaved)
    return dataclasses.replace(BASE, max_rank=None, model=Model(modules, read_name))


def stacked(*parts: str) -> dict[str, np.ndarray]:
    tensors = {}
    if "w13" in parts:
        name = BLOCK if parts == ("w13",) else f"{BLOCK}.base_layer"
        tensors |= pair(name, RANK * COUNT, HIDDEN, 2 * INNER)
    if "w2" in parts:
        tensors |= pair(BLOCK, RANK * COUNT, INNER, HIDDEN)
    return tensors


def delta_of_expert(tensors, name: str, expert: int) -> np.ndarray:
    """As vLLM and PEFT take one expert's A and B out of stacked ones, by their own words: see `experts.py`."""
    a, b = (tensors[f"{PEFT}{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    rank = a.shape[0] // COUNT
    return b.reshape(b.shape[0], rank, COUNT)[:, :, expert] @ a.reshape(COUNT, rank, -1)[expert]


def parts_of(w13: np.ndarray, w2: np.ndarray, *, is_interleaved: bool = False) -> dict[str, np.ndarray]:
    w1, w3 = (w13[::2], w13[1::2]) if is_interleaved else (w13[:INNER], w13[INNER:])
    return {"w1": w1, "w2": w2, "w3": w3}


def stacked_deltas(tensors, parts, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """What stacked experts add to w13 and w2 of one expert, with an alpha of 6; 0 for a part that is not there."""
    w13 = BLOCK if parts == ("w13",) else f"{BLOCK}.base_layer"
    return (
        delta_of_expert(tensors, w13, expert) * 3 if "w13" in parts else np.zeros((2 * INNER, HIDDEN)),
        delta_of_expert(tensors, BLOCK, expert) * 3 if "w2" in parts else np.zeros((HIDDEN, INNER)),
    )


def deltas_of(made, target, expert: int) -> dict[str, np.ndarray]:
    """What a pair each adds to the parts of one expert."""
    return {role: delta(made, f"{BLOCK}.{expert}.{name}", target / CONFIG_FILE) for role, name in NAMES.items()}


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for role, array in wanted.items():
        np.testing.assert_array_equal(found[role], array)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("parts", [("w13", "w2"), ("w13",), ("w2",)], ids="+".join)
def test_stacked_experts_become_a_pair_each(tmp_path, parts, is_interleaved):
    tensors = stacked(*parts)
    base = base_of(ExpertFormat.PER_EXPERT, is_interleaved=is_interleaved)
    verified, made, target = convert(tmp_path, tensors, base, r=RANK, lora_alpha=6, target_modules=[])
    assert verified.conversion.changes == (f"stacked experts split into a pair each ({3 * COUNT} modules)",)
    for expert in range(COUNT):
        wanted = parts_of(*stacked_deltas(tensors, parts, expert), is_interleaved=is_interleaved)
        assert_equal(deltas_of(made, target, expert), wanted)


def exchanged(tensors):
    """As PEFT before 0.19.1 saves the same experts: its `get_delta_weight` adds A's transpose times B's transpose."""
    made = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            made[name] = b.reshape(len(b), RANK, COUNT).transpose(2, 1, 0).reshape(RANK * COUNT, -1)
            made[name.replace("lora_A", "lora_B")] = (
                a.reshape(COUNT, RANK, -1).transpose(2, 1, 0).reshape(-1, RANK * COUNT)
            )
    return made


def of_inner(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.INNER", inner)
    monkeypatch.setattr(f"{__name__}.SIZES", sizes_of(inner))


@pytest.mark.parametrize("kind", [ExpertFormat.PER_EXPERT, ExpertFormat.STACKED])
@pytest.mark.parametrize(
    ("parts", "inner", "is_known"),
    [
        one
        for one in product((("w13", "w2"), ("w13",), ("w2",)), (INNER, HIDDEN // 2), (True, False))
        if one != (("w13",), HIDDEN // 2, False)  # there nothing says which side is A
    ],
)
def test_experts_of_an_old_peft_are_exchanged_back(tmp_path, monkeypatch, kind, parts, inner, is_known):
    of_inner(inner, monkeypatch)
    tensors = stacked(*parts)
    version = keys_of("0.18.0") if is_known else {}
    config = {"r": RANK, "lora_alpha": 6, "target_modules": [], **version}
    verified, made, target = convert(tmp_path, exchanged(tensors), base_of(kind), **config)
    assert len(verified.conversion.changes) == 1
    assert verified.conversion.changes[0].startswith("experts of PEFT before 0.19.1")
    for expert in range(COUNT):
        wanted = stacked_deltas(tensors, parts, expert)
        if kind is ExpertFormat.STACKED:
            found = stacked_deltas(made, ("w13", "w2"), expert)
            assert all(map(np.array_equal, found, wanted))
        else:
            assert_equal(deltas_of(made, target, expert), parts_of(*wanted))


# What a PEFT adds to its configuration, of the keys that tell; the first two are in each since 0.17.
SINCE = {"0.17.0": ("auto_mapping", "target_parameters"), "0.19.0": ("use_bdlora",), "0.20.0": ("velora_config",)}


def keys_of(version: str, **other):
    """As `adapter_config.json` of this PEFT has them (recorded); 0.17 does not say its version."""
    keys = {key: None for since, added in SINCE.items() if since <= version for key in added}
    return keys | ({"peft_version": version} if version >= "0.18" else {}) | other


def said(layout: str):
    return {"paramwrapper_layout": layout}


def with_keys_of_0_20(version: str):
    """A later PEFT has loaded and saved an adapter: it keeps the name of the version, and reads experts its own way."""
    return keys_of("0.20.0", peft_version=version)


OLD = [keys_of(one) for one in ("0.17.1", "0.18.1", "0.19.0", "0.18.2.dev0")] + [said("peft-0.18"), said("0.18.0")]
NEW = [keys_of(one) for one in ("0.19.1", "0.20.0", "0.21.2", "0.19.2.dev0@abc")] + [said("peft-0.19.1")]
NEW += [keys_of("0.21.2", peft_version="unknown"), keys_of("0.21.2", peft_version=None)]
OPEN = [
    {},
    {"peft_version": "0.21.2"},  # not PEFT's file
    {"target_parameters": ["mlp.experts.gate_up_proj"]},  # as NeMo Automodel, of either layout
    keys_of("0.19.0", peft_version=None),
    keys_of("0.19.1.dev0"),
    with_keys_of_0_20("0.18.0"),
    said("modern"),
    said("9" * 5_000),
]


@pytest.mark.parametrize(
    ("signs", "is_old"), [*((one, True) for one in OLD), *((one, False) for one in NEW), *((one, None) for one in OPEN)]
)
def test_signs_of_the_writer_decide_square_experts(tmp_path, monkeypatch, signs, is_old):
    of_inner(HIDDEN // 2, monkeypatch)
    tensors = stacked("w13")
    files = adapter_files(exchanged(tensors) if is_old else tensors, r=RANK, target_modules=[], **signs)
    base = base_of(ExpertFormat.PER_EXPERT)
    if is_old is None:
        refusal(tmp_path, files, base, says=r'square matrix.*"paramwrapper_layout": "peft-0\.18" or')
        return
    verified = verify_adapter(put(tmp_path, files), base, Settings())
    assert verified.conversion.changes[0].startswith("experts of PEFT before 0.19.1") is is_old
    # As after a restart: the store keeps the canonical configuration, of the source's weights and of the converted.
    again = parse_config(canonical_bytes(verified.config))
    assert again.peft_version == verified.config.peft_version
    if is_old:
        assert verified.conversion.config.peft_version == (0, 19, 1)


@pytest.mark.parametrize("config", [keys_of("0.18.0"), keys_of("0.21.2"), keys_of("0.19.0"), {}])
def test_square_experts_of_gpt_oss_differ_in_one_release(tmp_path, monkeypatch, config):
    """PEFT 0.19.0 exchanged A and B of just these, with Transformers 5."""
    of_inner(HIDDEN, monkeypatch)
    files = adapter_files(stacked("w2"), r=RANK, target_modules=[], **config)
    base = base_of(ExpertFormat.PER_EXPERT, is_interleaved=True)
    if config.get("peft_version") in ("0.18.0", "0.21.2"):
        verified = verify_adapter(put(tmp_path, files), base, Settings())
        assert verified.conversion.changes[0].startswith("stacked experts split")
    else:
        refusal(tmp_path, files, base, says="square")


def per_expert(roles=("w1", "w2", "w3"), experts=range(COUNT)) -> dict[str, np.ndarray]:
    tensors = {}
    for expert, role in product(experts, roles):
        one = pair(f"{BLOCK}.{expert}.{NAMES[role]}", RANK, *SIZES[role])
        tensors |= {name: value + expert for name, value in one.items()}
    return tensors


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize(
    ("roles", "experts"),
    [(("w1", "w2", "w3"), range(COUNT)), (("w1", "w3"), [0, 2]), (("w3",), [1]), (("w2",), [1, 2])],
)
def test_experts_one_by_one_are_stacked(tmp_path, roles, experts, changes, is_interleaved):
    tensors = per_expert(roles, experts)
    base = base_of(ExpertFormat.STACKED, is_interleaved=is_interleaved)
    verified, made, _ = convert(tmp_path, tensors, base, r=RANK, lora_alpha=6, target_modules=[], **changes)
    assert verified.conversion.changes == ("experts stacked (2 modules)",)
    config = verified.conversion.config
    original = tmp_path / "original" / CONFIG_FILE
    for expert in range(COUNT):
        expected = {
            role: delta(tensors, f"{BLOCK}.{expert}.{name}", original)
            if role in roles and expert in experts
            else np.zeros((SIZES[role][1], SIZES[role][0]))
            for role, name in NAMES.items()
        }
        rank = config.rank_pattern.get("gate_up_proj", RANK)
        w13 = delta_of_expert(made, f"{BLOCK}.base_layer", expert)
        w13 *= config.scaling(rank, config.alpha_pattern.get("gate_up_proj", 6))
        w2 = delta_of_expert(made, BLOCK, expert) * config.scaling(RANK, 6)
        for role, array in parts_of(w13, w2, is_interleaved=is_interleaved).items():
            assert np.allclose(array, expected[role], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "tensors",
    [
        pair(f"{BLOCK}.base_layer", RANK * (COUNT + 1), HIDDEN, 2 * INNER) | stacked("w2"),
        pair(f"{BLOCK}.base_layer", RANK * COUNT, HIDDEN + 1, 2 * INNER) | stacked("w2"),
        pair(f"{BLOCK}.base_layer", RANK * COUNT, HIDDEN, INNER) | stacked("w2"),
    ],
)
def test_stacked_experts_of_other_shapes_are_refused(tmp_path, tensors):
    refusal(tmp_path, tensors, base_of(ExpertFormat.PER_EXPERT), kind=IncompatibleAdapter, r=RANK)


# --- experts of another rank, as trainers save them that divide `r` by the active experts


def grouped(tensors):
    """As Megatron-Bridge saves stacked experts: three dimensions under the parameters' own names."""
    made = {}
    for old, name in ((f"{BLOCK}.base_layer", "gate_up_proj"), (BLOCK, "down_proj")):
        if (a := tensors.get(f"{PEFT}{old}.lora_A.weight")) is not None:
            b = tensors[f"{PEFT}{old}.lora_B.weight"]
            made[f"{PEFT}{BLOCK}.{name}.lora_A.weight"] = a.reshape(COUNT, RANK, -1)
            made[f"{PEFT}{BLOCK}.{name}.lora_B.weight"] = b.reshape(len(b), RANK, COUNT).transpose(2, 0, 1)
    return made


FORMS = {
    "stacked": lambda: stacked("w13", "w2"),
    "exchanged": lambda: exchanged(stacked("w13", "w2")),
    "grouped": lambda: grouped(stacked("w13", "w2")),
    "one by one": per_expert,
}


@pytest.mark.parametrize("kind", [ExpertFormat.PER_EXPERT, ExpertFormat.STACKED])
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_another_rank_are_served_as_their_refusal_says(tmp_path, form, kind):
    config = {"r": 4 * RANK, "lora_alpha": 6, "target_modules": "all-linear"}
    error = refusal(tmp_path, FORMS[form](), base_of(kind), kind=IncompatibleAdapter, **config)
    assert f"rank {RANK}" in error.found
    assert f"rank {4 * RANK}" in error.expected
    assert "UNMATCHED" not in error.remedy, "which would serve it without its experts"
    said = json.loads("{" + re.search(r'"rank_pattern": \{[^}]+\}', error.remedy)[0] + "}")
    mended = put(tmp_path / "mended", adapter_files(FORMS[form](), **config, **said))
    verified = verify_adapter(mended, base_of(kind), Settings())
    config = (verified.conversion or verified).config
    w2 = f"{BLOCK}.0.down_proj" if kind is ExpertFormat.PER_EXPERT else f"{BLOCK}.down_proj"
    rank, alpha = config.ranks()(w2, PatternBudget()), config.alphas()(w2, PatternBudget())
    assert (rank, config.scaling(rank, alpha)) == (RANK, 6 / RANK)


def test_the_said_pattern_matches_no_shared_experts():
    ranks = parse_config(config_bytes(r=8, rank_pattern={"experts.*": 2})).ranks()
    names = ("mlp.experts.0.up_proj", "mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.w1")
    assert [ranks(f"model.layers.0.{name}", PatternBudget()) for name in names] == [2, 2, 8, 8]


# --- experts without gate_proj (Nemotron), and with sides that all experts share


@pytest.mark.parametrize("form", ["stacked", "exchanged", "grouped"])
def test_stacked_experts_without_gate_proj_become_a_pair_each(tmp_path, form):
    """`_convert_lora_to_paramwrapper` of NeMo Automodel writes `exchanged`; B of w13 has the rows of up_proj alone."""
    tensors = pair(f"{BLOCK}.base_layer", RANK * COUNT, HIDDEN, INNER) | stacked("w2")
    saved = {"stacked": lambda it: it, "exchanged": exchanged, "grouped": grouped}[form](tensors)
    _, made, target = convert(
        tmp_path,
        saved,
        base_of(ExpertFormat.PER_EXPERT, {"w1": "up_proj", "w2": "down_proj"}),
        r=RANK,
        lora_alpha=6,
        target_modules=[],
    )
    assert len(made) == 2 * 2 * COUNT
    for expert in range(COUNT):
        for name, old in (("up_proj", f"{BLOCK}.base_layer"), ("down_proj", BLOCK)):
            found = delta(made, f"{BLOCK}.{expert}.{name}", target / CONFIG_FILE)
            assert np.array_equal(found, delta_of_expert(tensors, old, expert) * 3)


def of_one(tensors, side: str, expert: int) -> np.ndarray:
    its = tensors[f"{PEFT}{BLOCK}.{side}.weight"].astype(float)
    return its[expert if len(its) > 1 else 0]


@pytest.mark.parametrize("parts", [("gate_up_proj.lora_A", "down_proj.lora_B"), ("gate_up_proj.lora_A",)])
def test_sides_that_all_experts_share_are_given_to_each(tmp_path, parts):
    """Megatron-Bridge with shared outer matrices, as SGLang reads them (`experts_shared_outer_loras`)."""
    tensors = grouped(stacked("w13", "w2"))
    tensors = {name: its[:1] if any(part in name for part in parts) else its for name, its in tensors.items()}
    base = base_of(ExpertFormat.PER_EXPERT)
    _, made, target = convert(tmp_path, tensors, base, r=RANK, lora_alpha=6, target_modules=[])
    for expert in range(COUNT):
        w13, w2 = (
            of_one(tensors, f"{name}.lora_B", expert) @ of_one(tensors, f"{name}.lora_A", expert) * 3
            for name in ("gate_up_proj", "down_proj")
        )
        assert_equal(deltas_of(made, target, expert), parts_of(w13, w2))


def test_shared_sides_are_named_where_the_engine_stacks(tmp_path):
    tensors = {
        name: its[:1] if ".gate_up_proj.lora_A" in name else its for name, its in grouped(stacked("w13", "w2")).items()
    }
    error = refusal(tmp_path, tensors, base_of(ExpertFormat.STACKED), says="Megatron-Bridge's experts", r=RANK)
    assert "experts_shared_outer_loras" in error.remedy


@pytest.mark.parametrize(
    "other",
    [
        pair(f"{BLOCK}.{COUNT}.gate_proj", RANK, HIDDEN, INNER),
        pair(f"{BLOCK}.0.gate_proj", RANK, HIDDEN, INNER + 1),
        pair(f"{BLOCK}.0.gate_proj", RANK, HIDDEN, INNER, "float16"),
        pair(f"{BLOCK}.x.gate_proj", RANK, HIDDEN, INNER),
        pair(f"{BLOCK}.0.other_proj", RANK, HIDDEN, INNER),
    ],
)
def test_experts_that_do_not_go_together_are_refused(tmp_path, other):
    tensors = per_expert(experts=[1, 2]) | other
    refusal(tmp_path, tensors, base_of(ExpertFormat.STACKED), kind=IncompatibleAdapter, r=RANK)
