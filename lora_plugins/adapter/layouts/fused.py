"""Rules of a conversion for fused modules, such as `qkv_proj`, and their parts: `split` and `join`.

`conversion_plan.py` calls the rules in the API server and on the command line. In go pairs by names and shapes, and
where names land (`Names`); out come the taken pairs and the pairs in the engine's form (`Change`).

A fused module's B stacks its parts' rows, `(out_q + out_k + out_v, rank)`, and the parts share A. So a fused pair is
split without loss: each part takes A, and its rows of B. Parts are joined into a pair of the sum of their ranks: A
stacks the parts' A, B has each part's block on its diagonal.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from lora_plugins.adapter.layouts.tensors import Change, Names, NewPair, Part, Placed, new_pair
from lora_plugins.adapter.model_modules import ModuleKind
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.weights import LoraPair

# Only modules whose parts lie one after the other in every model with the module (others interleave heads).
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED = {part: fused for fused, parts in _PARTS.items() for part in parts}


def split(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield fused pairs as parts, where the engine has parts."""
    for pair in paced(pairs):
        parent, _, leaf = pair.module.rpartition(".")
        if leaf not in _PARTS:
            continue
        parts = [f"{parent}.{part}" for part in _PARTS[leaf]]
        places = [names.place(part) for part in parts]
        sizes = [place.out_features for place in places if place is not None and place.out_features is not None]
        # Another number of rows: the model has another form of the module, and a split would cut at wrong rows.
        if len(sizes) != len(parts) or sum(sizes) != pair.b.shape[0]:
            continue
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        made = [
            new_pair(
                part,
                ([pair.a], pair.a.shape, Part()),
                ([pair.b], (size, pair.b.shape[1]), Part(((begin, begin + size, 1),))),
                pair.rank,
                pair.alpha,
            )
            for part, begin, size in zip(parts, begins, sizes, strict=True)
        ]
        yield [pair], made, f"{leaf} split into {', '.join(_PARTS[leaf])}"


def join(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield all or some parts as a fused pair, where the engine has a single fused module."""
    groups: dict[str, dict[str, LoraPair]] = defaultdict(dict)
    for pair in paced(pairs):
        parent, _, leaf = pair.module.rpartition(".")
        if leaf in _FUSED:
            groups[f"{parent}.{_FUSED[leaf]}"][leaf] = pair
    for module, found in groups.items():
        parts = _PARTS[module.rpartition(".")[2]]
        place = names.place(module)
        if place is None or place.kind is not ModuleKind.LINEAR or len(place.matrices) != len(parts):
            continue
        sizes = dict(zip(parts, place.matrices, strict=True))
        taken = [(part, found[part]) for part in parts if part in found]
        joined = _joined(module, taken, sizes, names)
        if joined is not None:
            leaf = module.rpartition(".")[2]
            yield [pair for _, pair in taken], [joined], f"{', '.join(part for part, _ in taken)} joined into {leaf}"


def _joined(module: str, taken: Sequence[tuple[str, LoraPair]], sizes: dict[str, int], names: Names) -> NewPair | None:
    """Return a pair for the parts; None where inputs, outputs, dtypes or scalings differ."""
    scalings = [names.config.scaling(pair.rank, pair.alpha) for _, pair in taken]
    kinds = {(pair.a.dtype, pair.b.dtype, pair.a.shape[1]) for _, pair in taken}
    if len(kinds) != 1 or any(pair.b.shape[0] != sizes[part] for part, pair in taken):
        return None
    if not all(math.isclose(scaling, scalings[0]) for scaling in scalings):
        return None  # a factor would have to be multiplied into B, and rounded
    first = taken[0][1]
    inputs, outputs, rank = first.a.shape[1], sum(sizes.values()), sum(pair.rank for _, pair in taken)
    # The last sum, where the last part ends, is left over.
    begins = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    of_a, of_b, end = [], [], 0
    for part, pair in taken:
        ranks = (end, end + pair.rank, 1)
        end += pair.rank
        of_a.append((ranks,))
        of_b.append(((begins[part], begins[part] + sizes[part], 1), ranks))
    return new_pair(
        module,
        ([pair.a for _, pair in taken], (rank, inputs), Placed((rank, inputs), tuple(of_a))),
        ([pair.b for _, pair in taken], (outputs, rank), Placed((outputs, rank), tuple(of_b))),
        rank,
        names.config.alpha_for(rank, first.rank, first.alpha),
    )
