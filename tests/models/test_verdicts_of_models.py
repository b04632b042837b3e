"""Generated adapters on real models: what vLLM loads whole is served, or deliberately refused; all that is served is.

Whether vLLM loads one whole is `testbed/loads_whole.py`, which uses nothing of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace
from testbed.architectures import ARCHITECTURES, BY_NAME
from testbed.forked_engines import Engine, ForkedEngines

QUICK = {"LlamaForCausalLM": 60, "OPTForCausalLM": 60}
NIGHTLY_EXAMPLES = 150

# What we refuse although vLLM would load it whole, by row of the table in
# docs/reference/verification.md, and by our words.
DELIBERATE = {
    "ranks": r"rank \d+ in '.*' and \d+ in '|expected A .* of rank \d+ by the configuration",
    "lost": r"no tensors for \d+ modules that target_modules names",
    "alpha": r"an adapter without effect: lora_alpha 0",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one.label, marks=[] if one.label in QUICK else [pytest.mark.nightly]) for one in ARCHITECTURES
    ],
)
def model(
    request: pytest.FixtureRequest, engines: ForkedEngines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine, ModelModules]]:
    with engines.engine(BY_NAME[request.param], tmp_path_factory.mktemp("model")) as engine:
        engine.call("build")
        yield request.param, engine, ModelModules.of_plain(engine.call("make"))


Tensors = dict[str, tuple[int, ...]]
PEFT = "base_model.model."
RANK = 4


def tensors_of(name: str, place: ModulePlace) -> Tensors:
    """The pair of one module, as PEFT names and shapes it."""
    ends = (
        (".lora_embedding_A", ".lora_embedding_B")
        if place.kind is ModuleKind.EMBEDDING
        else (".lora_A.weight", ".lora_B.weight")
    )
    rank = RANK * (place.stacked or 1)
    shapes = (rank, place.in_features), (place.out_features, rank)
    return {f"{PEFT}{name}{end}": shape for end, shape in zip(ends, shapes, strict=True)}


def renamed(change: Any) -> Any:
    return lambda tensors: {change(name): shape for name, shape in tensors.items()}


def resized(side: int, dimension: int, by: int) -> Any:
    def change(tensors: Tensors) -> Tensors:
        name = list(tensors)[side]
        shape = list(tensors[name])
        shape[dimension] = max(1, shape[dimension] + by)
        return {**tensors, name: tuple(shape)}

    return change


def of_rank(rank: int) -> Any:
    return lambda tensors: {
        name: (rank, shape[1]) if side == 0 else (shape[0], rank) for side, (name, shape) in enumerate(tensors.items())
    }


CHANGES: dict[str, Any] = {
    "no first prefix": renamed(lambda name: name.removeprefix(PEFT)),
    "PEFT's prefix twice": renamed(lambda name: PEFT + name),
    "another prefix": renamed(lambda name: name.replace(PEFT, PEFT + "language_model.")),
    "a prefix fewer": renamed(lambda name: name.replace(PEFT + "model.", PEFT)),
    "a compiled model's prefix": renamed(lambda name: name.replace(PEFT, PEFT + "_orig_mod.")),
    "a default adapter's key": renamed(lambda name: name.replace(".weight", ".default.weight")),
    "misspelt": renamed(lambda name: name.replace("_proj", "_prjo").replace("fc", "cf")),
    "another layer": renamed(lambda name: re.sub(r"\.(\d)\.", ".7.", name)),
    "a fused name": renamed(
        lambda name: re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name).replace("up_proj.", "gate_up_proj.")
    ),
    "both prefixes": lambda tensors: {**tensors, **CHANGES["a prefix fewer"](tensors)},
    "with and without": lambda tensors: {**tensors, **CHANGES["no first prefix"](tensors)},
    "once and twice": lambda tensors: {**tensors, **CHANGES["PEFT's prefix twice"](tensors)},
    "embedding's names": renamed(
        lambda name: name.replace(".lora_A.weight", ".lora_embedding_A").replace(".lora_B.weight", ".lora_embedding_B")
    ),
    "linear names": renamed(
        lambda name: name.replace(".lora_embedding_A", ".lora_A.weight").replace(".lora_embedding_B", ".lora_B.weight")
    ),
    "A alone": lambda tensors: dict(list(tensors.items())[:1]),
    "B alone": lambda tensors: dict(list(tensors.items())[1:]),
    "a weight too": lambda tensors: {**tensors, next(iter(tensors)).split(".lora_")[0] + ".weight": (3, 3)},
    "the base's embeddings too": lambda tensors: {**tensors, PEFT + "model.embed_tokens.base_layer.weight": (256, 128)},
    "a bias": lambda tensors: {**tensors, list(tensors)[1].replace(".weight", ".bias"): (4,)},
    "more inputs": resized(0, 1, 1),
    "fewer inputs": resized(0, 1, -1),
    "more outputs": resized(1, 0, 1),
    "fewer outputs": resized(1, 0, -1),
    "half of the outputs": resized(1, 0, -64),
    "A of another rank": resized(0, 0, 1),
    "another rank": of_rank(8),
    "a rank of one": of_rank(1),
    "a larger rank than the slots'": of_rank(32),
    "three dimensions": lambda tensors: {name: (*shape, 1) for name, shape in tensors.items()},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 8": {"r": 8},
    "rank 4.0": {"r": 4.0},
    "rank 32": {"r": 32},
    "alpha 0": {"lora_alpha": 0},
    "alpha below 0": {"lora_alpha": -4},
    "no targets": {"target_modules": []},
    "other targets": {"target_modules": ["something_else"]},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "a rank pattern": {"rank_pattern": {"q_proj": 8}},
    "an alpha pattern": {"alpha_pattern": {"q_proj": 8}},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "a bias": {"bias": "all"},
    "lower case": {"peft_type": "lora"},
    "no kind": {"peft_type": None},
}


@st.composite
def adapters(draw: Any, places: dict[str, ModulePlace]) -> tuple[Tensors, dict[str, Any], list[str]]:
    tensors: Tensors = {}
    notes = []
    names = draw(st.lists(st.sampled_from(sorted(places)), min_size=1, max_size=5, unique=True))
    if draw(st.booleans()):  # all experts of a layer, as vLLM wants them
        layers = {places[name].module for name in names if places[name].kind is ModuleKind.EXPERTS}
        names += [name for name, place in places.items() if place.module in layers and name not in names]
    changed = draw(st.integers(0, len(names) - 1)) if draw(st.integers(0, 3)) else None
    for number, name in enumerate(names):
        pair = tensors_of(name, places[name])
        if number == changed:
            change = draw(st.sampled_from(sorted(CHANGES)))
            notes.append(change)
            pair = CHANGES[change](pair)
        tensors |= pair
    config = draw(st.sampled_from(sorted(CONFIGS))) if not notes else "plain"
    notes.append(config)
    return tensors, {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], **CONFIGS[config]}, notes


def test_verdicts_are_those_of_vllms_own_loading(model: tuple[str, Engine, ModelModules]) -> None:
    name, engine, modules = model
    known = {place: one for place, one in modules.places.items() if one.in_features and one.out_features}

    seen = set()

    @settings(max_examples=QUICK.get(name, NIGHTLY_EXAMPLES))
    @given(adapters(known))
    def compare(adapter: tuple[Tensors, dict[str, Any], list[str]]) -> None:
        tensors, config, notes = adapter
        refused, whole, stored_whole = engine.call("verdict_of", tensors, config)
        seen.add(bool(refused))
        if not refused:
            assert stored_whole == "", notes
        elif whole == "":
            assert any(re.search(words, refused) for words in DELIBERATE.values()), (notes, refused)

    compare()
    assert seen == {True, False}
