"""Whether an adapter has all modules of the engine's model that the adapter's configuration names as trained.

PEFT trains every module that `target_modules` names. So a name without tensors, or a layer without tensors, was lost
when the adapter was saved, converted or copied, or belongs to a base model with more layers; vLLM computes such a
module as if untrained. Regular expressions and whole paths are not compared: another program's names. Nor are

- parts of a fused module (`gate_up_proj`) without any part in the adapter: the model that PEFT trained may have the
  fused module whole, under a name that `target_modules` lacks (GLM-4);
- modules with another name in the engine than in the checkpoint (Nemotron-H's `embeddings` is the engine's
  `embed_tokens`);
- other layers' parts of a fused module but the first: models may have no keys or values in some layers, where the
  engine's fused module has rows for keys and values all the same (Gemma 3n and 4).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind
from lora_plugins.adapter.pace import paced
from lora_plugins.errors import IncompatibleAdapter

_EXAMPLES = 3
# Experts are checked in experts.py, all or none; `gate_proj` in `target_modules` does not mean experts that PEFT sees
# as a single parameter. A classifier's head is saved whole.
_KINDS = frozenset({ModuleKind.LINEAR, ModuleKind.EMBEDDING, ModuleKind.HEAD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def lost_modules(config: AdapterConfig, names: Collection[str], modules: ModelModules) -> tuple[str, ...]:
    """Return modules of the engine that the adapter's configuration names, without tensors in the adapter.

    Args:
        config: `trained` is empty where the configuration leaves layers or modules out on purpose.
        names: keys of `modules.places` with a pair in the adapter.
        modules: the engine's.
    """
    if not config.trained:
        return ()
    leaves, kinds, joined = set[str](), set[str](), set[str]()
    for name in paced(names):
        leaves.add(_leaf(name))
        kinds.add(_layerless(name))
        joined.add(_layerless(modules.places[name].module))
    renamed = " ".join(_texts(modules.renames))
    first: dict[str, str] = {}
    missing = []
    for name, place in paced(modules.places.items()):
        if place.kind not in _KINDS:
            continue
        is_first = first.setdefault(place.module, name) == name
        if name in names or _leaf(name) not in config.trained:
            continue
        is_alone = place.module == name
        if _leaf(name) in leaves:  # trained in other layers, or in another part of the model
            is_lost = is_first and _layerless(name) in kinds
        # The checkpoint may have another name for the module: nothing is known then.
        elif _leaf(name) in renamed:
            is_lost = False
        else:
            is_lost = is_alone or _layerless(place.module) in joined
        if is_lost:
            missing.append(name)
    return tuple(missing)


def lost(missing: Collection[str], about: str) -> IncompatibleAdapter:
    """Return the error for an adapter without these modules."""
    some = ", ".join(f"'{name}'" for _, name in zip(range(_EXAMPLES), missing, strict=False))
    return IncompatibleAdapter(
        f"no tensors for {len(missing)} modules that target_modules names, such as {some}{about}",
        expected="a pair for each module of the model that target_modules names",
        remedy="save or copy it again, from all ranks of the trainer, or serve it with the model that it was trained "
        "on; name in exclude_modules or layers_to_transform what was left out on purpose",
    )


def _texts(values: object) -> Iterator[str]:
    """Yield all texts in plain values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from (text for value in values.values() for text in _texts(value))
    elif isinstance(values, list | tuple):
        yield from (text for value in values for text in _texts(value))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _layerless(name: str) -> str:
    return _NUMBER.sub("*", name)
