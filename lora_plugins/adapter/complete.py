"""Whether an adapter has all that its own configuration says was trained, of what the engine's model has.

PEFT trains every module that `target_modules` names, so a name without tensors, or a layer without, was lost when the
adapter was saved, converted or copied, or belongs to a base model with more layers; vLLM computes it as if it had not
been trained. Regular expressions and whole paths are not compared: they are in the names of another program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.model_modules import Kind, ModelModules
from lora_plugins.adapter.pace import paced
from lora_plugins.errors import IncompatibleAdapter

_EXAMPLES = 3
# Experts are checked elsewhere, all or none; `gate_proj` in `target_modules` is not for those that PEFT sees as one
# parameter. A classifier's head is saved whole.
_KINDS = frozenset({Kind.LINEAR, Kind.EMBEDDING, Kind.HEAD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def lost_modules(config: AdapterConfig, names: Collection[str], modules: ModelModules) -> tuple[str, ...]:
    """Modules of the engine that the adapter's own configuration names, and for which it has nothing.

    Args:
        config: whose `trained` is empty where it leaves layers or modules out on purpose.
        names: keys of `modules.places` for which the adapter has a pair.
        modules: the engine's.
    """
    if not config.trained:
        return ()
    leaves, kinds = {_leaf(name) for name in names}, {_layerless(name) for name in names}
    return tuple(
        name
        for name in _expected(modules)
        if _leaf(name) in config.trained
        and name not in names
        and (_layerless(name) in kinds or _leaf(name) not in leaves)
    )


def lost(missing: Collection[str], about: str) -> IncompatibleAdapter:
    """The error for an adapter without these modules."""
    some = ", ".join(f"'{name}'" for _, name in zip(range(_EXAMPLES), missing, strict=False))
    return IncompatibleAdapter(
        f"no tensors for {len(missing)} modules that target_modules names, such as {some}{about}",
        expected="a pair for each module of the model that target_modules names",
        remedy="save or copy it again, from all ranks of the trainer, or serve it with the model that it was trained "
        "on; name in exclude_modules or layers_to_transform what was left out on purpose",
    )


def _expected(modules: ModelModules) -> Iterator[str]:
    """The modules that every layer has which has them at all.

    Of a fused module the first part alone: a model may have no keys or values of its own in some layers (Gemma 3n and 4
    share them), and the engine's fused module has a place for them all the same.
    """
    fused: set[str] = set()
    for name, place in paced(modules.places.items()):
        if place.kind in _KINDS and place.module not in fused:
            yield name
        fused.add(place.module)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _layerless(name: str) -> str:
    return _NUMBER.sub("*", name)
