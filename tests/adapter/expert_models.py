"""Models with one layer of experts, in the formats of an engine."""

from __future__ import annotations

import dataclasses

from lora_plugins.adapter.model_modules import ExpertFormat, Experts, ModelModules, ModuleKind, ModulePlace
from tests.make import MODULES

HIDDEN, INNER = 8, 6
BLOCK = "model.layers.0.mlp.experts"
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def sizes_of(inner: int = INNER) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each part of an expert."""
    outward = (HIDDEN, inner)
    return {"w1": outward, "w2": (inner, HIDDEN), "w3": outward, "w13": (HIDDEN, 2 * inner)}


def with_experts(
    *formats: ExpertFormat, count: int, inner: int = INNER, names: dict[str, str] = NAMES, is_interleaved: bool = False
) -> ModelModules:
    """`MODULES` with `count` experts beside them."""

    def place(part: str, stacked: int = 1) -> ModulePlace:
        return ModulePlace(BLOCK, ModuleKind.EXPERTS, *sizes_of(inner)[part], part=part, stacked=stacked)

    places = dict(MODULES.places)
    for part, name in names.items():
        if ExpertFormat.PER_EXPERT in formats:
            places |= {f"{BLOCK}.{expert}.{name}": place(part) for expert in range(count)}
        if ExpertFormat.SHARED in formats:
            places[f"{BLOCK}.{part}"] = place(part)
    if ExpertFormat.STACKED in formats:
        places |= {BLOCK: place("w2", count), f"{BLOCK}.base_layer": place("w13", count)}
    experts = {BLOCK: Experts(count, HIDDEN, inner, formats, names, is_interleaved)}
    return dataclasses.replace(MODULES, places=places, experts=experts)
