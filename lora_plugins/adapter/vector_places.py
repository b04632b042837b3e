"""Finds the engine's module for each of an adapter's vectors, the tensors that are no matrices A and B.

Runs in the API server and on the command line, for the errors alone, and in workers, which put the vectors into slots.
In go names and shapes and the engine's description of its model; out come the vectors with their modules.

A module computes `y = g * (W x + s B A x) + c`: `g` and `c` have a number for each output, and stand for 1 and 0 where
an adapter has none. DoRA: `g = m / norm of each row of W + s B A` (arXiv 2402.09353). `lora_bias`: `c = s * bias`.
PEFT's `bias`: `c` is the saved bias less the base model's. IA3: `g` alone, which scales the layer's own bias too (arXiv
2205.05638); a factor of an input of a gated MLP's `down_proj` is a factor of the same output of `up_proj`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from lora_plugins.adapter.config import malformed
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.weights import Beside, BesideKind
from lora_plugins.errors import IncompatibleAdapter

# The kinds of vectors, each with the element that changes nothing.
NEUTRAL = {
    BesideKind.MAGNITUDE: 1.0,
    BesideKind.B_BIAS: 0.0,
    BesideKind.BIAS: 0.0,
    BesideKind.OUTPUTS: 1.0,
    BesideKind.INPUTS: 1.0,
}
_WITH_MAGNITUDE = (ModuleKind.LINEAR, ModuleKind.EMBEDDING, ModuleKind.HEAD)
_MERGE = "merge the adapter into the base model"


def vectors_of(
    beside: Iterable[Beside], modules: ModelModules, read: Callable[[str], str | None], *, is_whole_model: bool = True
) -> Iterator[tuple[Beside, str]]:
    """Yield the tensors that `g` and `c` are made of, each with the name of its module in `ModelModules.places`.

    Args:
        beside: of the adapter's weights.
        modules: the engine's.
        read: returns the engine's name for the module of an A's name, or None.
        is_whole_model: whether a module that is none of `modules` is nowhere in the model.

    Raises:
        IncompatibleAdapter: a module that the engine computes without vectors, or a vector of another size.
        InvalidAdapter: two vectors of a kind for one module.
    """
    names: dict[tuple[str, BesideKind], str] = {}  # of tensors, by module and kind
    for one in paced(beside):
        if one.kind not in NEUTRAL or modules.skips(one.name_of_a):
            continue
        key = modules.key(read(one.name_of_a) or one.module)
        if key is None and not is_whole_model:
            continue
        found = f"'{one.tensor.name}' ({one.kind.key})"
        if modules.without_vectors:
            raise IncompatibleAdapter(found, expected=f"A and B alone, {modules.without_vectors}", remedy=_MERGE)
        place = modules.places.get(key or "")
        expected = "vectors of linear layers with LoRA in this engine, or magnitudes of an embedding or a head"
        if one.kind is BesideKind.INPUTS and place is not None:
            key, expected = place.factor, "factors of outputs, or of inputs of a gated MLP's down_proj"
            place = modules.places.get(key)
        takes = _WITH_MAGNITUDE if one.kind is BesideKind.MAGNITUDE else (ModuleKind.LINEAR,)
        if key is None or place is None or place.kind not in takes:
            raise IncompatibleAdapter(found, expected=expected, remedy=_MERGE)
        size = math.prod(one.tensor.shape)
        if place.out_features not in (None, size):
            raise IncompatibleAdapter(
                f"{found} of {size} values",
                expected=f"{place.out_features}",
                remedy="serve it with the base model that it was trained on",
            )
        if (other := names.setdefault((key, one.kind), one.tensor.name)) != one.tensor.name:
            raise malformed(f"tensors '{other}' and '{one.tensor.name}' for module '{key}'", "one of them")
        yield one, key
