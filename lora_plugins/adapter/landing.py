"""Checks that every tensor of an adapter lands: that the engine's model has the tensor's module, of the same sizes.

`check_landing` runs in the API server and on the command line, before the engine gets an adapter; `check_pairs` also in
each worker, on the weights that vLLM has read. In go the adapter's pairs, by names and shapes, and the engine's
description of its model; out come notes on modules left out, or the error that names the modules.

vLLM's own function reads names, with the model's own mapping; the caller passes the function (`Model.read_name`), and
nothing of vLLM is imported here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_plugins.adapter.complete import REMEDY, ReadPair, check_experts, some
from lora_plugins.adapter.config import IA3, malformed
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace, Unadapted
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.weights import LoraPair, Weights, is_copy_of_embeddings
from lora_plugins.adapter.writers import by_keys, in_words, wrappers_in
from lora_plugins.errors import IncompatibleAdapter

# A tensor's name → the tensor's module, and whether the tensor is A; ValueError for a name that is no LoRA weight.
ReadName = Callable[[str], tuple[str, bool]]
# A module's name → its name in another version of Transformers.
Respell = Callable[[str], str]

# Why modules take no adapter, as the end of a sentence that begins with "modules"; None: the model lacks the modules.
_FOUND = {
    None: "that the model does not have",
    Unadapted.TOWER: "of the multimodal tower or connector, which need --enable-tower-connector-lora",
    Unadapted.TARGET: "that this server's --lora-target-modules leaves out",
    Unadapted.KIND: "that vLLM cannot adapt in this model",
    Unadapted.UNCALLED: "that this engine never computes with an adapter",
    Unadapted.OTHERWISE: "that this engine turns or scales, and an adapter of them not",
}
# Of modules that the model has, but whose adapters this engine would compute wrongly or not at all.
_COMPUTED_OTHERWISE = (Unadapted.UNCALLED, Unadapted.OTHERWISE)
_REMEDIES = {  # by the same reasons
    None: REMEDY,
    Unadapted.TOWER: "restart the server with --enable-tower-connector-lora",
    Unadapted.TARGET: "restart the server with these in --lora-target-modules, or without it",
    Unadapted.KIND: "train it without these modules",
    Unadapted.UNCALLED: "train it without these modules, or merge the adapter into the model (vllm-project/vllm#48974)",
    Unadapted.OTHERWISE: "train it without these modules, or merge the adapter into the model",
}


@dataclass(frozen=True)
class Model:
    """The engine's description of its model, the engine's reading of names, and other spellings of names."""

    modules: ModelModules
    read_name: ReadName
    respellings: tuple[Respell, ...] = ()

    def read(self, tensor: str) -> str | None:
        """Return the engine's name for the module of a tensor; None where the name is not of vLLM's grammar."""
        try:
            return self.read_name(tensor)[0]
        except ValueError:
            return None

    @functools.cached_property
    def form(self) -> str:
        """A digest of all facts that decide how adapters are converted: equal digests, equal conversions."""
        return hashlib.sha256(json.dumps(self.modules.plain(), sort_keys=True).encode()).hexdigest()


def check_landing(weights: Weights, model: Model, about: str, *, refuse_unmatched: bool = True) -> tuple[str, ...]:
    """Compare an adapter's tensors with the engine's modules, before the engine gets the adapter; return notes.

    Args:
        weights: the adapter's tensors.
        model: the engine's description.
        about: the base models that the adapter names and the server serves, for errors.
        refuse_unmatched: as for `check_pairs`.

    Raises:
        IncompatibleAdapter, InvalidAdapter: as `check_pairs`.
    """
    # Skipped pairs are pairs that vLLM itself leaves out on purpose.
    pairs = [_read(pair, model) for pair in paced(weights.pairs) if not model.modules.skips(pair.a.name)]
    notes: tuple[str, ...] = ()
    if weights.pairs:  # IA3 has none
        notes = check_pairs(pairs, model.modules, about=f" ({about})", refuse_unmatched=refuse_unmatched)
    _check_vocabulary(weights, model.modules)
    _check_heads(weights, model.modules, f" ({about})")
    return notes


def landed(weights: Weights, model: Model) -> frozenset[str]:
    """Return the engine's modules with a pair or IA3's factors, by their names in `ModelModules.places`."""
    of_pairs = (_read(pair, model).name for pair in weights.pairs)
    of_factors = (model.read(one.name_of_a) or one.module for one in weights.beside if one.kind.key == IA3)
    found = (model.modules.key(name) for name in paced(itertools.chain(of_pairs, of_factors)))
    return frozenset(name for name in found if name is not None)


def _read(pair: LoraPair, model: Model) -> ReadPair:
    # `check_pairs` reports a name out of vLLM's grammar as unmatched.
    name = model.read(pair.a.name) or pair.module
    return ReadPair(name, pair.a.name, pair.a.shape, pair.b.shape, pair.rank, pair.is_looked_up)


def check_pairs(
    pairs: Iterable[ReadPair],
    modules: ModelModules,
    *,
    about: str = "",
    elsewhere: Collection[str] = (),
    is_whole_model: bool = True,
    refuse_unmatched: bool = True,
) -> tuple[str, ...]:
    """Compare all pairs of an adapter with the engine's modules; return notes on modules left out.

    `check_pairs` alone decides. The API server asks before the engine gets an adapter. Each worker asks about the
    weights that vLLM has read, since adapters come to workers in other ways too.

    Args:
        pairs: of the adapter.
        modules: the engine's, or in a worker the modules of its stage of a pipeline.
        about: added to the findings of errors.
        elsewhere: names of experts that other workers load.
        is_whole_model: whether `modules` are all of the model's; false for a stage, whose worker does not know the
            other stages' modules.
        refuse_unmatched: refuse an adapter with some modules that the model lacks; an adapter without any matching
            module is always refused.

    Raises:
        IncompatibleAdapter: a module that the model lacks, or other sizes than the module's own.
        InvalidAdapter: A and B that are no pair of matrices.
    """
    matched: dict[str, ReadPair] = {}
    unmatched: list[str] = []
    for pair in paced(pairs):
        key = modules.key(pair.name)
        if key is None:
            unmatched.append(pair.name)
            continue
        place = modules.places[key]
        _check_looked_up(key, pair, place, modules)
        if place.kind is not ModuleKind.EXPERTS:
            _check_matrices(pair)
            _check_sizes(pair, place, about)
        # vLLM would keep the last pair silently, and answers would depend on the order of tensors.
        if key in matched:
            raise IncompatibleAdapter(
                f"two pairs for module '{key}', '{matched[key].tensor}' and '{pair.tensor}'",
                expected="one, as vLLM would take the last",
                remedy="save the adapter again with PEFT",
            )
        matched[key] = pair
    _check_copies(matched, modules)
    check_experts(matched, modules, elsewhere, about)
    # A stage of a pipeline does not know other stages' modules, but knows which of its own are computed otherwise.
    lost = [name for name in unmatched if is_whole_model or modules.why_unadapted(name) in _COMPUTED_OTHERWISE]
    if matched and not lost:
        return ()
    # Without any match, the error names all unmatched modules, even those that another stage may have.
    error = _mismatch(lost or unmatched, len(matched) + len(unmatched), modules, about)
    if refuse_unmatched or not matched:
        raise error
    return (f"served without {error.found}",)  # with LORA_PLUGINS_UNMATCHED=warn, a note and no error


def _check_copies(matched: Mapping[str, ReadPair], modules: ModelModules) -> None:
    """Refuse a pair for one of two modules that share a weight, without a pair for the other: half of the effect."""
    for name, copy in modules.copies.items():
        if name in matched and copy not in matched:
            raise IncompatibleAdapter(
                f"a pair for '{name}' and none for '{copy}', which the model computes with the same weight",
                expected="the same pair for both",
                remedy="ask for it by name, so that it is converted, or save the pair under both names",
            )


def _mismatch(unmatched: Sequence[str], total: int, modules: ModelModules, about: str) -> IncompatibleAdapter:
    """Return the error that names examples of unmatched modules, and the reasons."""
    by_reason: dict[Unadapted | None, list[str]] = {}
    for name in unmatched:
        by_reason.setdefault(modules.why_unadapted(name), []).append(name)
    found, remedies = [], []
    for why, names in by_reason.items():
        text, remedy = f"{len(names)} of {total} modules {_FOUND[why]}, such as {some(names)}", _REMEDIES[why]
        if why is None and (cause := _cause(names)) is not None:
            text, remedy = f"{text}, {cause[0]}", cause[1]
        found.append(text)
        remedies.append(remedy)
    if not by_reason:  # vLLM skips every tensor of the adapter
        found, remedies = [f"0 of {total} modules {_FOUND[None]}"], [REMEDY]
    return IncompatibleAdapter(
        " and ".join(found) + about,
        expected=f"modules of the model, such as {some(_alike(unmatched, modules))}",
        remedy="; ".join(remedies) + (", or set LORA_PLUGINS_UNMATCHED=warn" if len(unmatched) < total else ""),
    )


def _cause(names: Sequence[str]) -> tuple[str, str] | None:
    """Return why names do not match, with a remedy, where the program that wrote the adapter explains it; else None."""
    wrappers = wrappers_in(names)
    if wrappers:
        held = "save it again from the model that the wrapper holds, or take these out of its keys; where it does not"
        return f"with {in_words(wrappers)}", f"{held} fit then, {REMEDY}"
    writer = by_keys(f"{name}.lora_A.weight" for name in names)
    return None if writer is None else (f"in {writer.name}", writer.remedy)


def _check_matrices(pair: ReadPair) -> None:
    """Refuse A and B that are no two matrices of one rank."""
    if len(pair.a) == len(pair.b) == 2 and pair.a[0] == pair.b[1]:
        return
    shapes = " and ".join(str(shape) if shape else "nothing" for shape in (pair.a, pair.b))
    raise malformed(f"lora_A and lora_B of {pair.name} with {shapes}", "(rank, features) and (features, rank)")


def _check_sizes(pair: ReadPair, place: ModulePlace, about: str) -> None:
    """Refuse other sizes than the place's; None in a place stands for a size that any pair fits."""
    inputs, outputs = pair.a[1], pair.b[0]
    has_fewer = place.max_out_features and place.out_features is not None and outputs < place.out_features
    if place.in_features in (None, inputs) and (place.out_features in (None, outputs) or has_fewer):
        return
    sizes = f"{inputs} inputs and {outputs} outputs in module '{pair.name}'"
    more = _more_words(inputs, outputs, place)
    raise IncompatibleAdapter(
        (f"{sizes}, {more} words more than the base model's vocabulary" if more else sizes) + about,
        expected=f"{place.in_features} inputs and {place.out_features} outputs",
        remedy="merge the adapter into the model with these words and serve the result" if more else REMEDY,
    )


def _more_words(inputs: int, outputs: int, place: ModulePlace) -> int:
    """Return how many words were added, if added words alone keep a head or an embedding from fitting; otherwise 0."""
    # The vocabulary is on the side of a head's outputs, and of an embedding's inputs.
    if place.kind is ModuleKind.HEAD:
        has_other_features, words, its_words = inputs != place.in_features, outputs, place.out_features
    elif place.kind is ModuleKind.EMBEDDING:
        has_other_features, words, its_words = outputs != place.out_features, inputs, place.in_features
    else:
        return 0
    return 0 if has_other_features or its_words is None else max(0, words - its_words)


def _check_looked_up(name: str, pair: ReadPair, place: ModulePlace, modules: ModelModules) -> None:
    """Refuse as vLLM does: `from_lora_tensors` compares an embedding's A with the vocabulary for any module."""
    if pair.is_looked_up and place.kind is not ModuleKind.EMBEDDING and pair.a[-1] != modules.vocabulary:
        raise IncompatibleAdapter(
            f"an embedding's tensors for module '{name}', which is none",
            expected="tensors named <module>.lora_A.weight and .lora_B.weight",
            remedy="save the adapter again with PEFT",
        )


def _check_vocabulary(weights: Weights, modules: ModelModules) -> None:
    """Refuse a resized vocabulary: vLLM leaves copies of the base model's embeddings out, and computes with its own."""
    for tensor in weights.others:
        # An unknown size of the vocabulary (None) refuses nothing.
        is_wanted = modules.vocabulary is None or modules.vocabulary in tensor.shape
        if is_copy_of_embeddings(tensor) and not is_wanted:
            raise IncompatibleAdapter(
                f"a resized vocabulary in '{tensor.name}', shape {list(tensor.shape)}",
                expected=f"the base model's, of {modules.vocabulary} words",
                remedy="merge the adapter into the base model",
            )


def _check_heads(weights: Weights, modules: ModelModules, about: str) -> None:
    """Refuse a classifier's whole head unless the engine has the head, with as many labels and features."""
    heads = {name: place for name, place in modules.places.items() if place.kind is ModuleKind.CLASSIFIER}
    for tensor in weights.others:
        if is_copy_of_embeddings(tensor):
            continue
        name, part = tensor.name.split(".")[-2:]
        labels, features = tensor.shape[0], tensor.shape[1:]
        found = f"a classifier's head '{tensor.name}' of {labels} labels" + "".join(
            f" and {n} features" for n in features
        )
        place = heads.get(name)
        if place is None:
            known = f"whose head is {some(heads)}" if heads else "which has no classifier's head to replace"
            raise IncompatibleAdapter(
                found + about,
                expected=f"an adapter for {modules.architecture}, {known}",
                remedy="serve it on a server of the classifier that it was trained on",
            )
        # A weight is (labels, features), a bias (labels).
        wanted = (place.in_features,) if part == "weight" else ()
        if features != wanted or (labels != place.out_features and not place.max_out_features):
            raise IncompatibleAdapter(
                found + about,
                expected=f"{place.out_features} labels" + "".join(f" and {n} features" for n in wanted),
                remedy=f"{REMEDY}; heads of other numbers of labels need --max-lora-cls-labels",
            )


def _alike(unmatched: Sequence[str], modules: ModelModules) -> Iterable[str]:
    """Return the model's modules whose last part is the first unmatched name's; all modules where none has."""
    last = {name.rsplit(".", 1)[-1] for name in unmatched[:1]}
    return [name for name in modules.places if name.rsplit(".", 1)[-1] in last] or modules.places
