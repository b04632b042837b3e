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
from lora_plugins.adapter.model_modules import ExpertFormat, Experts, ModelModules, ModuleKind, ModulePlace
from lora_plugins.adapter.patterns import PatternBudget
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import convert, delta
from tests.make import BASE, PEFT, adapter_files, config_bytes, pair, put, read_name

COUNT, HIDDEN, INNER, RANK = 3, 8, 6, 2
MODULE = "model.layers.0.mlp.experts"
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SIZES = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}


def base_of(kind: ExpertFormat, *, is_interleaved: bool = False):
    experts = Experts(COUNT, HIDDEN, INNER, (kind,), NAMES, is_interleaved)
    if kind is ExpertFormat.PER_EXPERT:
        places = {
            f"{MODULE}.{expert}.{NAMES[role]}": ModulePlace(MODULE, ModuleKind.EXPERTS, *SIZES[role], part=role)
            for expert, role in product(range(COUNT), ("w1", "w2", "w3"))
        }
    else:
        stacked = {"part": "w13", "stacked": COUNT}
        places = {
            f"{MODULE}.base_layer": ModulePlace(MODULE, ModuleKind.EXPERTS, HIDDEN, 2 * INNER, **stacked),
            MODULE: ModulePlace(MODULE, ModuleKind.EXPERTS, INNER, HIDDEN, part="w2", stacked=COUNT),
        }
    modules = ModelModules("TinyForCausalLM", "0.32.0", places, experts={MODULE: experts})
    return dataclasses.replace(BASE, max_rank=None, model=Model(modules, read_name))


def stacked(*parts: str) -> dict[str, np.ndarray]:
    tensors = {}
    if "w13" in parts:
        name = MODULE if parts == ("w13",) else f"{MODULE}.base_layer"
        tensors |= pair(name, RANK * COUNT, HIDDEN, 2 * INNER)
    if "w2" in parts:
        tensors |= pair(MODULE, RANK * COUNT, INNER, HIDDEN)
    return tensors


def delta_of_expert(tensors, name: str, expert: int) -> np.ndarray:
    """As vLLM and PEFT take one expert's A and B out of stacked ones, by their own words: see `experts.py`."""
    a, b = (tensors[f"{PEFT}{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    rank = a.shape[0] // COUNT
    return b.reshape(b.shape[0], rank, COUNT)[:, :, expert] @ a.reshape(COUNT, rank, -1)[expert]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("parts", [("w13", "w2"), ("w13",), ("w2",)], ids="+".join)
def test_stacked_experts_become_a_pair_each(tmp_path, parts, is_interleaved):
    tensors = stacked(*parts)
    base = base_of(ExpertFormat.PER_EXPERT, is_interleaved=is_interleaved)
    verified, made, target = convert(tmp_path, tensors, base, r=RANK, lora_alpha=6, target_modules=[])
    assert verified.conversion.changes == (f"stacked experts split into a pair each ({3 * COUNT} modules)",)
    for expert in range(COUNT):
        found = {role: delta(made, f"{MODULE}.{expert}.{name}", target / CONFIG_FILE) for role, name in NAMES.items()}
        if "w13" in parts:
            w13 = delta_of_expert(tensors, MODULE if parts == ("w13",) else f"{MODULE}.base_layer", expert) * 3
            halves = (w13[::2], w13[1::2]) if is_interleaved else (w13[:INNER], w13[INNER:])
            assert np.array_equal(found["w1"], halves[0])
            assert np.array_equal(found["w3"], halves[1])
        else:
            assert not found["w1"].any()
            assert not found["w3"].any()
        w2 = delta_of_expert(tensors, MODULE, expert) * 3 if "w2" in parts else np.zeros((HIDDEN, INNER))
        assert np.array_equal(found["w2"], w2)


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
    monkeypatch.setattr(f"{__name__}.SIZES", {"w1": (HIDDEN, inner), "w2": (inner, HIDDEN), "w3": (HIDDEN, inner)})


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
    if kind is ExpertFormat.STACKED:
        for part, name in (("w13", f"{MODULE}.base_layer"), ("w2", MODULE)):
            old = MODULE if parts == ("w13",) else name
            for expert in range(COUNT):
                found = delta_of_expert(made, name, expert)
                expected = delta_of_expert(tensors, old, expert) if part in parts else 0 * found
                assert np.array_equal(found, expected)
        return
    for expert in range(COUNT):
        found = {role: delta(made, f"{MODULE}.{expert}.{name}", target / CONFIG_FILE) for role, name in NAMES.items()}
        if "w13" in parts:
            w13 = delta_of_expert(tensors, MODULE if parts == ("w13",) else f"{MODULE}.base_layer", expert) * 3
            assert np.array_equal(np.concatenate([found["w1"], found["w3"]]), w13)
        w2 = delta_of_expert(tensors, MODULE, expert) * 3 if "w2" in parts else np.zeros((HIDDEN, inner))
        assert np.array_equal(found["w2"], w2)


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
        with pytest.raises(IncompatibleAdapter, match=r'square matrix.*"paramwrapper_layout": "peft-0\.18" or'):
            verify_adapter(put(tmp_path, files), base, Settings())
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
        with pytest.raises(IncompatibleAdapter, match="square"):
            verify_adapter(put(tmp_path, files), base, Settings())


def per_expert(roles=("w1", "w2", "w3"), experts=range(COUNT)) -> dict[str, np.ndarray]:
    tensors = {}
    for expert, role in product(experts, roles):
        one = pair(f"{MODULE}.{expert}.{NAMES[role]}", RANK, *SIZES[role])
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
            role: delta(tensors, f"{MODULE}.{expert}.{name}", original)
            if role in roles and expert in experts
            else np.zeros((SIZES[role][1], SIZES[role][0]))
            for role, name in NAMES.items()
        }
        rank = config.rank_pattern.get("gate_up_proj", RANK)
        w13 = delta_of_expert(made, f"{MODULE}.base_layer", expert)
        w13 *= config.scaling(rank, config.alpha_pattern.get("gate_up_proj", 6))
        halves = (w13[::2], w13[1::2]) if is_interleaved else (w13[:INNER], w13[INNER:])
        assert np.allclose(halves[0], expected["w1"], rtol=1e-12, atol=0)
        assert np.allclose(halves[1], expected["w3"], rtol=1e-12, atol=0)
        w2 = delta_of_expert(made, MODULE, expert) * config.scaling(RANK, 6)
        assert np.allclose(w2, expected["w2"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "tensors",
    [
        pair(f"{MODULE}.base_layer", RANK * (COUNT + 1), HIDDEN, 2 * INNER) | stacked("w2"),
        pair(f"{MODULE}.base_layer", RANK * COUNT, HIDDEN + 1, 2 * INNER) | stacked("w2"),
        pair(f"{MODULE}.base_layer", RANK * COUNT, HIDDEN, INNER) | stacked("w2"),
    ],
)
def test_stacked_experts_of_other_shapes_are_refused(tmp_path, tensors):
    original = put(tmp_path, adapter_files(tensors, r=RANK))
    with pytest.raises(IncompatibleAdapter):
        verify_adapter(original, base_of(ExpertFormat.PER_EXPERT), Settings())


# --- experts of another rank, as trainers save them that divide `r` by the active experts


def grouped(tensors):
    """As Megatron-Bridge saves stacked experts: three dimensions under the parameters' own names."""
    made = {}
    for old, name in ((f"{MODULE}.base_layer", "gate_up_proj"), (MODULE, "down_proj")):
        if (a := tensors.get(f"{PEFT}{old}.lora_A.weight")) is not None:
            b = tensors[f"{PEFT}{old}.lora_B.weight"]
            made[f"{PEFT}{MODULE}.{name}.lora_A.weight"] = a.reshape(COUNT, RANK, -1)
            made[f"{PEFT}{MODULE}.{name}.lora_B.weight"] = b.reshape(len(b), RANK, COUNT).transpose(2, 0, 1)
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
    with pytest.raises(IncompatibleAdapter) as caught:
        verify_adapter(put(tmp_path / "as-saved", adapter_files(FORMS[form](), **config)), base_of(kind), Settings())
    assert f"rank {RANK}" in caught.value.found
    assert f"rank {4 * RANK}" in caught.value.expected
    assert "UNMATCHED" not in caught.value.remedy, "which would serve it without its experts"
    said = json.loads("{" + re.search(r'"rank_pattern": \{[^}]+\}', caught.value.remedy)[0] + "}")
    mended = put(tmp_path / "mended", adapter_files(FORMS[form](), **config, **said))
    verified = verify_adapter(mended, base_of(kind), Settings())
    config = (verified.conversion or verified).config
    w2 = f"{MODULE}.0.down_proj" if kind is ExpertFormat.PER_EXPERT else f"{MODULE}.down_proj"
    rank, alpha = config.ranks()(w2, PatternBudget()), config.alphas()(w2, PatternBudget())
    assert (rank, config.scaling(rank, alpha)) == (RANK, 6 / RANK)


def test_the_said_pattern_matches_no_shared_experts():
    ranks = parse_config(config_bytes(r=8, rank_pattern={"experts.*": 2})).ranks()
    names = ("mlp.experts.0.up_proj", "mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.w1")
    assert [ranks(f"model.layers.0.{name}", PatternBudget()) for name in names] == [2, 2, 8, 8]


# --- experts without gate_proj (Nemotron), and with sides that all experts share


def gateless(kind=ExpertFormat.PER_EXPERT):
    names = {"w1": "up_proj", "w2": "down_proj"}
    places = {
        f"{MODULE}.{expert}.{name}": ModulePlace(MODULE, ModuleKind.EXPERTS, *SIZES[role], part=role)
        for expert, (role, name) in product(range(COUNT), names.items())
    }
    experts = {MODULE: Experts(COUNT, HIDDEN, INNER, (kind,), names)}
    return dataclasses.replace(
        BASE, max_rank=None, model=Model(ModelModules("Tiny", "0.32.0", places, experts=experts), read_name)
    )


@pytest.mark.parametrize("form", ["stacked", "exchanged", "grouped"])
def test_stacked_experts_without_gate_proj_become_a_pair_each(tmp_path, form):
    """`_convert_lora_to_paramwrapper` of NeMo Automodel writes `exchanged`; B of w13 has the rows of up_proj alone."""
    tensors = pair(f"{MODULE}.base_layer", RANK * COUNT, HIDDEN, INNER) | stacked("w2")
    saved = {"stacked": lambda it: it, "exchanged": exchanged, "grouped": grouped}[form](tensors)
    _, made, target = convert(tmp_path, saved, gateless(), r=RANK, lora_alpha=6, target_modules=[])
    assert len(made) == 2 * 2 * COUNT
    for expert in range(COUNT):
        for name, old in (("up_proj", f"{MODULE}.base_layer"), ("down_proj", MODULE)):
            found = delta(made, f"{MODULE}.{expert}.{name}", target / CONFIG_FILE)
            assert np.array_equal(found, delta_of_expert(tensors, old, expert) * 3)


@pytest.mark.parametrize("parts", [("gate_up_proj.lora_A", "down_proj.lora_B"), ("gate_up_proj.lora_A",)])
def test_sides_that_all_experts_share_are_given_to_each(tmp_path, parts):
    """Megatron-Bridge with shared outer matrices, as SGLang reads them (`experts_shared_outer_loras`)."""
    tensors = grouped(stacked("w13", "w2"))
    tensors = {name: its[:1] if any(part in name for part in parts) else its for name, its in tensors.items()}
    base = base_of(ExpertFormat.PER_EXPERT)
    _, made, target = convert(tmp_path, tensors, base, r=RANK, lora_alpha=6, target_modules=[])
    for expert in range(COUNT):
        of = {
            name: [
                its[expert if len(its) > 1 else 0].astype(float)
                for side in "AB"
                for its in [tensors[f"{PEFT}{MODULE}.{name}.lora_{side}.weight"]]
            ]
            for name in ("gate_up_proj", "down_proj")
        }
        w13, w2 = (b @ a * 3 for a, b in of.values())
        found = {role: delta(made, f"{MODULE}.{expert}.{name}", target / CONFIG_FILE) for role, name in NAMES.items()}
        assert np.array_equal(np.concatenate([found["w1"], found["w3"]]), w13)
        assert np.array_equal(found["w2"], w2)


def test_shared_sides_are_named_where_the_engine_stacks(tmp_path):
    tensors = {
        name: its[:1] if ".gate_up_proj.lora_A" in name else its for name, its in grouped(stacked("w13", "w2")).items()
    }
    with pytest.raises(IncompatibleAdapter, match="Megatron-Bridge's experts") as caught:
        verify_adapter(put(tmp_path, adapter_files(tensors, r=RANK)), base_of(ExpertFormat.STACKED), Settings())
    assert "experts_shared_outer_loras" in caught.value.remedy


@pytest.mark.parametrize(
    "other",
    [
        pair(f"{MODULE}.{COUNT}.gate_proj", RANK, HIDDEN, INNER),
        pair(f"{MODULE}.0.gate_proj", RANK, HIDDEN, INNER + 1),
        pair(f"{MODULE}.0.gate_proj", RANK, HIDDEN, INNER, "float16"),
        pair(f"{MODULE}.x.gate_proj", RANK, HIDDEN, INNER),
        pair(f"{MODULE}.0.other_proj", RANK, HIDDEN, INNER),
    ],
)
def test_experts_that_do_not_go_together_are_refused(tmp_path, other):
    original = put(tmp_path, adapter_files(per_expert(experts=[1, 2]) | other, r=RANK))
    with pytest.raises(IncompatibleAdapter):
        verify_adapter(original, base_of(ExpertFormat.STACKED), Settings())
