"""Mixtures of experts: a pair for each expert's matrices, or all experts of a layer stacked in two pairs.

PEFT stacks experts that Transformers 5 keeps in two parameters (`target_parameters`): w1 and w3 as w13 under
`experts.base_layer`, w2 under `experts`. Of E experts with rank r, A is `(E * r, in)`, expert by expert, and B
`(out, r * E)`, in which the experts alternate. Source: `_stack_moe_lora_weights` and `_convert_3d_to_2d_moe_lora` in
vllm/lora/model_manager.py, 0.32, of which the second does this for engines of both formats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_plugins.adapter.layouts.names import Names
from lora_plugins.adapter.layouts.tensors import Change, Make, NewPair, new_pair
from lora_plugins.adapter.model_modules import ExpertFormat, Experts
from lora_plugins.adapter.weights import LoraPair

_ROLES = {"w1": "w1", "gate_proj": "w1", "w2": "w2", "down_proj": "w2", "w3": "w3", "up_proj": "w3"}


def unstack(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Stacked experts, for an engine that takes a pair for each matrix of each expert."""
    layers: dict[str, list[LoraPair]] = defaultdict(list)
    for pair in pairs:
        if pair.module.endswith((".experts", ".experts.base_layer")):
            layers[pair.module.removesuffix(".base_layer")].append(pair)
    for module, found in layers.items():
        experts = names.experts(module)
        if experts is None or ExpertFormat.PER_EXPERT not in experts.formats or len(experts.names) != 3:
            continue
        by_role = {role: pair for pair in found if (role := _stacked_role(pair, experts)) is not None}
        if len(by_role) != len(found):
            continue
        yield found, list(_unstacked(module, by_role, experts)), "stacked experts split into a pair each"


def _stacked_role(pair: LoraPair, experts: Experts) -> str | None:
    """Whether this is w13 or w2 of all experts, by its shape: one parameter alone is saved under `experts`."""
    rank = experts.count * pair.rank
    shapes = (pair.a.shape, pair.b.shape)
    if shapes == ((rank, experts.hidden_size), (2 * experts.intermediate_size, rank)):
        return "w13"
    is_w2 = shapes == ((rank, experts.intermediate_size), (experts.hidden_size, rank))
    return "w2" if is_w2 and pair.module.endswith(".experts") else None


def _unstacked(module: str, by_role: Mapping[str, LoraPair], experts: Experts) -> Iterator[NewPair]:
    """A pair for each matrix of each expert; vLLM wants all three, so those that are missing are zeros."""
    rows = {**_rows_in_w13(experts), "w2": slice(None)}
    for expert in range(experts.count):
        for role in ("w1", "w2", "w3"):
            pair = by_role.get("w2" if role == "w2" else "w13")
            name = f"{module}.{expert}.{experts.names[role]}"
            inputs, outputs = _sizes(role, experts)
            if pair is None:
                yield _zeros(name, next(iter(by_role.values())), inputs, outputs)
                continue
            yield new_pair(
                name,
                ([pair.a], (pair.rank, inputs), _rows_of(expert, pair.rank)),
                ([pair.b], (outputs, pair.rank), _columns_of(expert, experts.count, rows[role])),
                pair.rank,
                pair.alpha,
            )


def stack(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """A pair for each matrix of each expert, for an engine that takes all experts of a layer stacked."""
    layers: dict[str, dict[tuple[int, str], LoraPair]] = defaultdict(dict)
    for pair in pairs:
        module, _, leaf = pair.module.rpartition(".")
        module, _, number = module.rpartition(".")
        if module.endswith(".experts") and number.isdecimal() and leaf in _ROLES:
            layers[module][int(number), _ROLES[leaf]] = pair
    for module, found in layers.items():
        experts = names.experts(module)
        if experts is None or experts.formats != (ExpertFormat.STACKED,):
            continue
        if not all(_fits(expert, role, pair, experts) for (expert, role), pair in found.items()):
            continue
        first = next(iter(found.values()))
        if any((pair.rank, pair.alpha, pair.a.dtype, pair.b.dtype) != _kind(first) for pair in found.values()):
            continue
        yield list(found.values()), _stacked(module, found, experts, names), "experts stacked"


def _kind(pair: LoraPair) -> tuple[int, float, str, str]:
    return pair.rank, pair.alpha, pair.a.dtype, pair.b.dtype


def _fits(expert: int, role: str, pair: LoraPair, experts: Experts) -> bool:
    inputs, outputs = _sizes(role, experts)
    return expert < experts.count and (pair.a.shape, pair.b.shape) == ((pair.rank, inputs), (outputs, pair.rank))


def _sizes(role: str, experts: Experts) -> tuple[int, int]:
    inner, hidden = experts.intermediate_size, experts.hidden_size
    return (inner, hidden) if role == "w2" else (hidden, inner)


def _rows_in_w13(experts: Experts) -> dict[str, slice]:
    """Which rows of w13's B are w1's and w3's."""
    inner = experts.intermediate_size
    step, begin_of_w3 = (2, 1) if experts.is_interleaved else (1, inner)
    return {"w1": slice(0, step * inner, step), "w3": slice(begin_of_w3, 2 * inner, step)}


def _stacked(module: str, found: Mapping[tuple[int, str], LoraPair], experts: Experts, names: Names) -> list[NewPair]:
    first = next(iter(found.values()))
    inner, hidden, rank = experts.intermediate_size, experts.hidden_size, first.rank
    present = {role for _, role in found}
    rows = {role: its_rows for role, its_rows in _rows_in_w13(experts).items() if role in present}
    w13_rank = rank * max(1, len(rows))
    return [
        _stack_of(
            f"{module}.base_layer",
            found,
            rows,
            sizes=(experts.count, hidden, 2 * inner),
            rank=w13_rank,
            alpha=first.alpha if w13_rank == rank else names.alpha_for(names.scaling(first), w13_rank),
        ),
        _stack_of(
            module,
            found,
            {"w2": slice(None)},
            sizes=(experts.count, inner, hidden),
            rank=rank,
            alpha=first.alpha,
        ),
    ]


def _stack_of(
    module: str,
    found: Mapping[tuple[int, str], LoraPair],
    rows: Mapping[str, slice],
    *,
    sizes: tuple[int, int, int],
    rank: int,
    alpha: float,
) -> NewPair:
    """All experts' matrices of some roles, each with ranks of its own beside the others', and rows of B."""
    count, inputs, outputs = sizes
    roles = list(rows)
    places = [(expert, role) for expert, role in found if role in roles]
    taken = [found[place] for place in places]
    some = next(iter(found.values()))
    each = some.rank

    def make_a(arrays: Sequence[Any]) -> Any:
        import numpy as np

        made = np.zeros((count, rank, inputs), arrays[0].dtype)
        for (expert, role), array in zip(places, arrays, strict=False):
            begin = roles.index(role) * each
            made[expert, begin : begin + each] = array
        return made.reshape(count * rank, inputs)

    def make_b(arrays: Sequence[Any]) -> Any:
        import numpy as np

        made = np.zeros((outputs, rank, count), arrays[0].dtype)
        for (expert, role), array in zip(places, arrays, strict=False):
            begin = roles.index(role) * each
            made[rows[role], begin : begin + each, expert] = array
        return made.reshape(outputs, rank * count)

    return new_pair(
        module,
        ([pair.a for pair in taken] or [some.a], (count * rank, inputs), make_a),
        ([pair.b for pair in taken] or [some.b], (outputs, rank * count), make_b),
        rank,
        alpha,
    )


def _zeros(module: str, like: LoraPair, inputs: int, outputs: int) -> NewPair:
    """A pair that adds nothing."""
    a, b = (like.rank, inputs), (outputs, like.rank)
    return new_pair(module, ([like.a], a, _nothing(a)), ([like.b], b, _nothing(b)), like.rank, like.alpha)


def _nothing(shape: tuple[int, int]) -> Make:
    def make(arrays: Sequence[Any]) -> Any:
        import numpy as np

        return np.zeros(shape, arrays[0].dtype)

    return make


def _rows_of(expert: int, rank: int) -> Make:
    return lambda arrays: arrays[0][expert * rank : (expert + 1) * rank]


def _columns_of(expert: int, count: int, rows: slice) -> Make:
    return lambda arrays: arrays[0].reshape(len(arrays[0]), -1, count)[rows, :, expert]
