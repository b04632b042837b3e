"""Checks that an adapter is whole: has all modules that its configuration names as trained, and all experts of a layer.

Runs in the API server and on the command line when an adapter is compared with the served model (`fit.py`,
`landing.py`); `check_experts` also in each worker. In go names and shapes of the adapter's tensors and the engine's
description of its model; out come the missing modules, or an error.

PEFT trains every module that `target_modules` names. So a name without tensors, or a layer without tensors, was lost
when the adapter was saved, converted or copied, or belongs to a base model with more layers; vLLM computes such a
module as if untrained. Regular expressions and whole paths are not compared, as they are names of modules in another
program. Not compared either are

- parts of a fused module (`gate_up_proj`) without any part in the adapter: the model that PEFT trained may have the
  fused module whole, under a name that `target_modules` lacks (GLM-4);
- modules with another name in the engine than in the checkpoint (Nemotron-H's `embeddings` is the engine's
  `embed_tokens`);
- the parts of a fused module after the first (`k_proj` and `v_proj` of `qkv_proj`), where other layers have them:
  models may have no keys or values in some layers, where the engine's fused module has rows for keys and values all
  the same (Gemma 3n and 4).

A mixture of experts must be whole, of the model's sizes, and in a format that the engine takes. Source: how vLLM 0.32
stacks and slices experts: `_create_merged_loras_inplace`, `_stack_moe_lora_weights` and `_convert_3d_to_2d_moe_lora`
in vllm/lora/model_manager.py, `set_lora` in vllm/lora/layers/fused_moe.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind, ModulePlace
from lora_plugins.adapter.paced_work import paced
from lora_plugins.errors import IncompatibleAdapter

_EXAMPLES = 3
REMEDY = "serve it with the base model that it was trained on"
# Kinds of modules that may count as lost. Experts never do: `check_experts` checks them, all or none, as `gate_proj` in
# `target_modules` does not mean experts that PEFT sees as a single parameter. A classifier's head is saved whole.
_KINDS = frozenset({ModuleKind.LINEAR, ModuleKind.EMBEDDING, ModuleKind.HEAD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class ReadPair:
    """The shapes of A and B of one module, as an engine reads the pair.

    Attributes:
        name: the engine's name for the module, which vLLM's own function finds by A's name.
        tensor: A's name in the file.
        a, b: shapes, `()` for a missing side.
        rank: the configuration's for the module.
        is_looked_up: whether the tensors have an embedding's names.
    """

    name: str
    tensor: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    rank: int
    is_looked_up: bool = False


def lost_modules(config: AdapterConfig, names: Collection[str], modules: ModelModules) -> tuple[str, ...]:
    """Return modules of the engine that the adapter's configuration names, without tensors in the adapter.

    Args:
        config: nothing is lost where `trained` is empty: the configuration leaves layers or modules out on purpose, or
            names them in another way.
        names: keys of `modules.places` with a pair in the adapter.
        modules: the engine's.
    """
    if not config.trained:
        return ()
    # Of modules with a pair: the last parts of their names; their names without numbers of layers; and the names of the
    # fused modules that they are parts of, without numbers of layers.
    leaves, layerless, fused = set[str](), set[str](), set[str]()
    for name in paced(names):
        leaves.add(_leaf(name))
        layerless.add(_layerless(name))
        fused.add(_layerless(modules.places[name].module))
    renamed = " ".join(_texts(modules.renames))
    first_part: dict[str, str] = {}  # of each fused module: the name of its first part, such as `q_proj`
    missing = []
    for name, place in paced(modules.places.items()):
        if place.kind not in _KINDS:
            continue
        is_first = first_part.setdefault(place.module, name) == name
        if name in names or _leaf(name) not in config.trained:
            continue
        if _leaf(name) in leaves:  # trained in other layers, or in another part of the model
            # In another part, as a tower, the name may mean a module that PEFT did not see: not lost.
            is_lost = is_first and _layerless(name) in layerless
        elif _leaf(name) in renamed:  # the checkpoint may have another name for the module: nothing is known then
            is_lost = False
        else:  # trained nowhere: lost, unless it is one of several parts of a fused module that is trained nowhere
            is_lost = place.module == name or _layerless(place.module) in fused
        if is_lost:
            missing.append(name)
    return tuple(missing)


def lost(missing: Collection[str], about: str) -> IncompatibleAdapter:
    """Return the error for an adapter without these modules."""
    return IncompatibleAdapter(
        f"no tensors for {len(missing)} modules that target_modules names, such as {some(missing)}{about}",
        expected="a pair for each module of the model that target_modules names",
        remedy="save or copy it again, from all ranks of the trainer, or serve it with the model that it was trained "
        "on; name in exclude_modules or layers_to_transform what was left out on purpose",
    )


def some(names: Iterable[str]) -> str:
    """Return the first names, in quotes, as examples in an error."""
    return ", ".join(f"'{name}'" for name in itertools.islice(names, _EXAMPLES))


def _texts(values: object) -> Iterator[str]:
    """Yield all texts in plain values, however nested."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from (text for value in values.values() for text in _texts(value))
    elif isinstance(values, list | tuple):
        yield from (text for value in values for text in _texts(value))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _layerless(name: str) -> str:
    """Return the name with `*` in the place of numbers: equal for the same module of all layers."""
    return _NUMBER.sub("*", name)


def check_experts(pairs: Mapping[str, ReadPair], modules: ModelModules, elsewhere: Collection[str], about: str) -> None:
    """Compare an adapter's tensors for experts with the model's experts.

    Args:
        pairs: by the names of `modules.places`; other kinds of modules may be among the names.
        modules: the engine's.
        elsewhere: names of experts that other workers load, so that they may be missing here.
        about: the base models that the adapter names and the server serves.

    Raises:
        IncompatibleAdapter: other shapes than the model's, or experts with a missing part.
    """
    found: dict[str, set[bool]] = {}  # by the module of the experts: whether its pairs are stacked, or one by one
    for name, pair in paced(pairs.items()):
        place = modules.places.get(name)
        if place is None or place.kind is not ModuleKind.EXPERTS:
            continue
        found.setdefault(place.module, set()).add(place.stacked > 1)
        a, b = _shapes(place, modules, pair.rank)
        if (pair.a, pair.b) != (a, b):
            raise IncompatibleAdapter(
                f"A {list(pair.a)} and B {list(pair.b)} in module '{name}'{about}",
                expected=f"A {list(a)} and B {list(b)}, of rank {pair.rank} by the configuration",
                remedy=REMEDY,
            )
    # vLLM takes all parts of all experts of a layer, or none, in a single format.
    for name, place in paced(modules.places.items() if found else ()):
        if place.kind is not ModuleKind.EXPERTS or place.module not in found:
            continue
        of_formats = found[place.module]
        if len(of_formats) > 1:
            raise IncompatibleAdapter(
                f"experts of '{place.module}' both one by one and stacked{about}",
                expected="one format",
                remedy="save them in one format",
            )
        if (place.stacked > 1) in of_formats and name not in pairs and name not in elsewhere:
            raise IncompatibleAdapter(
                f"experts of '{place.module}' without '{name}'{about}",
                expected="all parts of all experts of a layer, or none",
                remedy="train it with gate_proj, up_proj and down_proj of every expert, or with none",
            )


def _shapes(place: ModulePlace, modules: ModelModules, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes that A and B of this rank have in a place for experts."""
    # Experts always have both sizes; 0 matches no tensor.
    inputs, outputs = place.in_features or 0, place.out_features or 0
    experts = modules.experts[place.module]
    # Tinker's form shares a side among all experts: w1 and w3 share A, w2 shares B.
    if ExpertFormat.SHARED in experts.formats:
        of_a, of_b = (experts.count, 1) if place.part == "w2" else (1, experts.count)
        return (of_a, rank, inputs), (of_b, outputs, rank)
    return (rank * place.stacked, inputs), (outputs, rank * place.stacked)
