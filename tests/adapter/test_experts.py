"""Experts of an adapter: all parts of a layer, of the model's sizes, in one format, or the adapter is refused."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from lora_plugins.adapter.landing import Model, check_landing
from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter
from tests.adapter.expert_models import BLOCK, sizes_of, with_experts
from tests.make import read_name

COUNT, RANK = 2, 4
SIZES = sizes_of()
model = partial(with_experts, count=COUNT)


def pair(name: str, a: tuple[int, ...], b: tuple[int, ...], rank: int = RANK) -> LoraPair:
    infos = (TensorInfo(f"{name}.lora_{side}.weight", "F32", shape, 0, 0) for side, shape in (("A", a), ("B", b)))
    return LoraPair(name, *infos, rank, 8)


def pairs(of: ModelModules) -> dict[str, LoraPair]:
    """As the model wants them."""
    found = {}
    for name, place in of.places.items():
        if place.kind is ModuleKind.EXPERTS:
            inputs, outputs = SIZES[place.part]
            a, b = (RANK * place.stacked, inputs), (outputs, RANK * place.stacked)
            if of.experts[BLOCK].formats == (ExpertFormat.SHARED,):
                a, b = ((COUNT, *a), (1, *b)) if place.part == "w2" else ((1, *a), (COUNT, *b))
            found[name] = pair(name, a, b)
    return found


def check(of: ModelModules, found: dict[str, LoraPair]) -> tuple[str, ...]:
    return check_landing(Weights(tuple(found.values())), Model(of, read_name), "base model a, served is b")


ONE = [(ExpertFormat.PER_EXPERT,), (ExpertFormat.STACKED,), (ExpertFormat.SHARED,)]


@pytest.mark.parametrize("formats", ONE)
def test_whole_experts_land(formats: tuple[ExpertFormat, ...]) -> None:
    assert check(model(*formats), pairs(model(*formats))) == ()


@pytest.mark.parametrize("formats", ONE)
def test_any_other_size_of_experts_is_refused(formats: tuple[ExpertFormat, ...]) -> None:
    of = model(*formats)
    for name, right in pairs(of).items():
        for side in ("a", "b"):
            shape = getattr(right, side).shape
            for axis in range(len(shape)):
                for by in (-1, 1, shape[axis]):
                    other = tuple(size + by * (i == axis) for i, size in enumerate(shape))
                    info = dataclasses.replace(getattr(right, side), shape=other)
                    with pytest.raises(IncompatibleAdapter, match="served is b") as caught:
                        check(of, pairs(of) | {name: dataclasses.replace(right, **{side: info})})
                    assert f"'{name}'" in caught.value.found
                    assert f"A {list(right.a.shape)} and B {list(right.b.shape)}" in caught.value.expected


@pytest.mark.parametrize("formats", ONE)
def test_another_rank_than_the_configurations_is_refused(formats: tuple[ExpertFormat, ...]) -> None:
    of = model(*formats)
    name, right = next(iter(pairs(of).items()))
    with pytest.raises(IncompatibleAdapter) as caught:
        check(of, pairs(of) | {name: dataclasses.replace(right, rank=RANK + 1)})
    assert f"rank {RANK + 1} by the configuration" in caught.value.expected


@pytest.mark.parametrize("formats", ONE)
def test_experts_without_a_part_are_refused(formats: tuple[ExpertFormat, ...]) -> None:
    """vLLM asserts it of what one worker loads; with expert parallelism, others' parts are missing unseen."""
    of = model(*formats)
    for name in pairs(of):
        with pytest.raises(IncompatibleAdapter) as caught:
            check(of, {other: right for other, right in pairs(of).items() if other != name})
        assert f"without '{name}'" in caught.value.found


def test_an_engine_of_two_formats_takes_either_of_them() -> None:
    both = model(ExpertFormat.PER_EXPERT, ExpertFormat.STACKED)
    for one in both.experts[BLOCK].formats:
        assert check(both, pairs(model(one))) == ()
    with pytest.raises(IncompatibleAdapter, match="both one by one and stacked"):
        check(both, pairs(both))


def test_an_adapter_without_experts_lands() -> None:
    q = "model.layers.0.self_attn.q_proj"
    assert check(model(ExpertFormat.PER_EXPERT), {q: pair(q, (RANK, 8), (8, RANK))}) == ()
