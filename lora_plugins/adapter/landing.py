"""Whether every tensor of an adapter lands in a module of the engine's model, with its sizes.

Names are read by vLLM's own function with the model's own mapping, which the caller hands in: nothing is imported here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lora_plugins.adapter.experts import Shapes, check_experts
from lora_plugins.adapter.model_modules import Kind, ModelModules, Place, Unadapted
from lora_plugins.adapter.pace import paced
from lora_plugins.adapter.weights import LoraPair, Weights
from lora_plugins.errors import IncompatibleAdapter

# A tensor's name → the module that it is for, and whether it is A; ValueError where it is no LoRA weight.
ReadName = Callable[[str], tuple[str, bool]]
# A module's name → its name in another version of Transformers.
Respell = Callable[[str], str]

_EXAMPLES = 3
_REMEDY = "serve it with the base model that it was trained on"
_FOUND = {
    None: "that the model does not have",
    Unadapted.TOWER: "of the multimodal tower or connector, which need --enable-tower-connector-lora",
    Unadapted.TARGET: "that this server's --lora-target-modules leaves out",
    Unadapted.KIND: "that vLLM cannot adapt in this model",
}
_REMEDIES = {
    None: _REMEDY,
    Unadapted.TOWER: "restart the server with --enable-tower-connector-lora",
    Unadapted.TARGET: "restart the server with these in --lora-target-modules, or without it",
    Unadapted.KIND: "train it without these modules",
}


@dataclass(frozen=True)
class Model:
    """What the engine says of its model, how it reads an adapter's names, and how these may be spelled otherwise."""

    modules: ModelModules
    read_name: ReadName
    respellings: tuple[Respell, ...] = ()

    @functools.cached_property
    def form(self) -> str:
        """A key of all that decides into which form an adapter is brought."""
        return hashlib.sha256(json.dumps(self.modules.plain(), sort_keys=True).encode()).hexdigest()


def check_landing(weights: Weights, model: Model, about: str, *, refuse_unmatched: bool = True) -> tuple[str, ...]:
    """Compare an adapter's tensors with the engine's modules; returns notes on what is served without them.

    Args:
        weights: the adapter's pairs.
        model: the engine's.
        about: which base models the adapter names and the server serves, for errors.
        refuse_unmatched: refuse an adapter of which some modules are not the model's; one with none is always refused.

    Raises:
        IncompatibleAdapter: a module that the model does not have, or other sizes than its own.
    """
    modules, unmatched = model.modules, []
    matched: dict[str, LoraPair] = {}
    experts: dict[str, LoraPair] = {}
    for pair in paced(weights.pairs):
        if modules.skips(pair.a.name):
            continue
        try:
            name, _ = model.read_name(pair.a.name)
        except ValueError:
            name = pair.module
        key = modules.key(name)
        if key is None:
            unmatched.append(name)
            continue
        place = modules.places[key]
        _check_looked_up(key, pair, place, modules)
        if place.kind is Kind.EXPERTS:
            experts[key] = pair
        else:
            check_sizes(name, (pair.a.shape, pair.b.shape), place, f" ({about})")
        if key in matched:
            raise _two_for_one(key, matched[key], pair)
        matched[key] = pair
    check_experts(
        {name: (pair.a.shape, pair.b.shape) for name, pair in experts.items()},
        modules,
        ranks={name: pair.rank for name, pair in experts.items()},
        about=f" ({about})",
    )
    _check_vocabulary(weights, modules)
    if matched and not unmatched:
        return ()
    error = mismatch(unmatched, len(matched) + len(unmatched), modules, f" ({about})")
    if refuse_unmatched or not matched:
        raise error
    return (f"served without {error.found}",)


def mismatch(
    unmatched: Sequence[str], total: int, modules: ModelModules, about: str = "", *, adapter: str = ""
) -> IncompatibleAdapter:
    """The error that names examples of what does not land, and why not; workers raise it too."""
    by_reason: dict[Unadapted | None, list[str]] = {}
    for name in unmatched:
        by_reason.setdefault(modules.why_unadapted(name), []).append(name)
    found = [
        f"{len(names)} of {total} modules {_FOUND[why]}, such as {_some(names)}" for why, names in by_reason.items()
    ]
    known = _some(_alike(unmatched, modules))
    return IncompatibleAdapter(
        " and ".join(found or [f"0 of {total} modules {_FOUND[None]}"]) + about,
        expected=f"modules of the model, such as {known}",
        remedy="; ".join(_REMEDIES[why] for why in by_reason or [None])
        + (", or set LORA_PLUGINS_UNMATCHED=warn" if len(unmatched) < total else ""),
        adapter=adapter,
    )


def check_sizes(name: str, shapes: Shapes, place: Place, about: str = "") -> None:
    """Compare A and B of one module, which is no mixture of experts, with its own.

    Raises:
        IncompatibleAdapter: they have other sizes.
    """
    inputs, outputs = shapes[0][-1], shapes[1][0]
    fewer = place.max_out_features and place.out_features is not None and outputs < place.out_features
    if place.in_features in (None, inputs) and (place.out_features in (None, outputs) or fewer):
        return
    raise IncompatibleAdapter(
        f"{inputs} inputs and {outputs} outputs in module '{name}'{about}",
        expected=f"{place.in_features} inputs and {place.out_features} outputs",
        remedy=_REMEDY,
    )


def _two_for_one(name: str, one: LoraPair, other: LoraPair) -> IncompatibleAdapter:
    return IncompatibleAdapter(
        f"two pairs for module '{name}', '{one.a.name}' and '{other.a.name}'",
        expected="one, as vLLM would take the last",
        remedy="save the adapter again with PEFT",
    )


def _check_looked_up(name: str, pair: LoraPair, place: Place, modules: ModelModules) -> None:
    """Refuse as vLLM does, whose `from_lora_tensors` compares an embedding's A with the vocabulary for any module."""
    if pair.is_looked_up and place.kind is not Kind.EMBEDDING and pair.a.shape[-1] != modules.vocabulary:
        raise IncompatibleAdapter(
            f"an embedding's tensors for module '{name}', which is none",
            expected="tensors named <module>.lora_A.weight and .lora_B.weight",
            remedy="save the adapter again with PEFT",
        )


def _check_vocabulary(weights: Weights, modules: ModelModules) -> None:
    """Copies of the base model's embeddings, which vLLM leaves out: right only while they are the base model's own."""
    for _, tensor in weights.base_embeddings:
        if modules.vocabulary is not None and modules.vocabulary not in tensor.shape:
            raise IncompatibleAdapter(
                f"a resized vocabulary in '{tensor.name}', shape {list(tensor.shape)}",
                expected=f"the base model's, of {modules.vocabulary} words",
                remedy="merge the adapter into the base model",
            )


def _alike(unmatched: Sequence[str], modules: ModelModules) -> Iterable[str]:
    last = {name.rsplit(".", 1)[-1] for name in unmatched[:1]}
    return [name for name in modules.places if name.rsplit(".", 1)[-1] in last] or modules.places


def _some(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for _, name in zip(range(_EXAMPLES), names, strict=False))
