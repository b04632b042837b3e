"""Mixtures of experts: a pair for each expert's matrices, or all experts of a layer stacked in two pairs.

PEFT stacks experts that Transformers 5 keeps in two parameters (`target_parameters`): w1 and w3 as w13 under
`experts.base_layer`, w2 under `experts`. Of E experts with rank r, A is `(E * r, in)`, expert by expert, and B `(out, r
* E)`, with alternating experts. Source: `_stack_moe_lora_weights` and `_convert_3d_to_2d_moe_lora` in
vllm/lora/model_manager.py, 0.32; the second function unstacks for engines of both formats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from lora_plugins.adapter.layouts.moves import ColumnsOfExpert, Rows, StackedA, StackedB, Zeros
from lora_plugins.adapter.layouts.names import Names
from lora_plugins.adapter.layouts.tensors import Change, NewPair, new_pair
from lora_plugins.adapter.model_modules import ExpertFormat, Experts
from lora_plugins.adapter.weights import LoraPair

_Rows = tuple[int, int, int]
_ROLES = {"w1": "w1", "gate_proj": "w1", "w2": "w2", "down_proj": "w2", "w3": "w3", "up_proj": "w3"}


def unstack(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield stacked experts as a pair for each matrix of each expert, for an engine of the format per expert."""
    layers: dict[str, list[LoraPair]] = defaultdict(list)
    for pair in pairs:
        if pair.module.endswith((".experts", ".experts.base_layer")):
            layers[pair.module.removesuffix(".base_layer")].append(pair)
    for module, found in layers.items():
        experts = names.experts(module)
        if experts is None or ExpertFormat.PER_EXPERT not in experts.formats or len(experts.names) != 3:
            continue
        by_role = {role: pair for pair in found if (role := _stacked_role(pair, experts)) is not None}
        # A pair of neither shape, or two of the same role: leave the layer to `check_landing`.
        if len(by_role) != len(found):
            continue
        yield found, list(_unstacked(module, by_role, experts)), "stacked experts split into a pair each"


def _stacked_role(pair: LoraPair, experts: Experts) -> str | None:
    """Return whether the pair is w13 or w2 of all experts, by shape: PEFT saves a parameter alone under `experts`."""
    rank = experts.count * pair.rank
    shapes = (pair.a.shape, pair.b.shape)
    if shapes == ((rank, experts.hidden_size), (2 * experts.intermediate_size, rank)):
        return "w13"
    is_w2 = shapes == ((rank, experts.intermediate_size), (experts.hidden_size, rank))
    return "w2" if is_w2 and pair.module.endswith(".experts") else None


def _unstacked(module: str, by_role: Mapping[str, LoraPair], experts: Experts) -> Iterator[NewPair]:
    """Yield a pair for each matrix of each expert; vLLM wants all three matrices, so a missing matrix is zeros."""
    rows = {**rows_in_w13(experts), "w2": (0, experts.hidden_size, 1)}
    for expert in range(experts.count):
        for role in ("w1", "w2", "w3"):
            pair = by_role.get("w2" if role == "w2" else "w13")
            name = f"{module}.{expert}.{experts.names[role]}"
            inputs, outputs = sizes_of(role, experts)
            if pair is None:
                yield zeros(name, next(iter(by_role.values())), inputs, outputs)
                continue
            yield new_pair(
                name,
                ([pair.a], (pair.rank, inputs), Rows(expert * pair.rank, pair.rank)),
                ([pair.b], (outputs, pair.rank), ColumnsOfExpert(expert, experts.count, rows[role])),
                pair.rank,
                pair.alpha,
            )


def stack(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield pairs for each expert's matrices as stacked pairs, for an engine of the stacked format."""
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
        # A pair that does not fit stays as it is, so that the error names the pair.
        if not all(_fits(expert, role, pair, experts) for (expert, role), pair in found.items()):
            continue
        first = next(iter(found.values()))
        # A stacked pair has a single rank, alpha and dtype for all experts.
        if any((pair.rank, pair.alpha, pair.a.dtype, pair.b.dtype) != _kind(first) for pair in found.values()):
            continue
        yield list(found.values()), _stacked(module, found, experts, names), "experts stacked"


def _kind(pair: LoraPair) -> tuple[int, float, str, str]:
    return pair.rank, pair.alpha, pair.a.dtype, pair.b.dtype


def _fits(expert: int, role: str, pair: LoraPair, experts: Experts) -> bool:
    inputs, outputs = sizes_of(role, experts)
    return expert < experts.count and (pair.a.shape, pair.b.shape) == ((pair.rank, inputs), (outputs, pair.rank))


def sizes_of(role: str, experts: Experts) -> tuple[int, int]:
    """Return the inputs and outputs of one expert's matrix."""
    inner, hidden = experts.intermediate_size, experts.hidden_size
    return (inner, hidden) if role == "w2" else (hidden, inner)


def rows_in_w13(experts: Experts) -> dict[str, _Rows]:
    """Return which rows of w13's B belong to w1 and to w3: the first, the end, the step."""
    inner = experts.intermediate_size
    step, begin_of_w3 = (2, 1) if experts.is_interleaved else (1, inner)
    return {"w1": (0, step * inner, step), "w3": (begin_of_w3, 2 * inner, step)}


def _stacked(module: str, found: Mapping[tuple[int, str], LoraPair], experts: Experts, names: Names) -> list[NewPair]:
    first = next(iter(found.values()))
    inner, hidden, rank = experts.intermediate_size, experts.hidden_size, first.rank
    present = {role for _, role in found}
    rows = {role: its_rows for role, its_rows in rows_in_w13(experts).items() if role in present}
    # Side by side: w1 and w3 have an A each, so w13 needs both ranks and zeros between.
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
            {"w2": (0, hidden, 1)},
            sizes=(experts.count, inner, hidden),
            rank=rank,
            alpha=first.alpha,
        ),
    ]


def _stack_of(
    module: str,
    found: Mapping[tuple[int, str], LoraPair],
    rows: Mapping[str, _Rows],
    *,
    sizes: tuple[int, int, int],
    rank: int,
    alpha: float,
) -> NewPair:
    """Return all experts' matrices of some roles as a pair; each role has its own ranks, and its own rows of B."""
    count, inputs, outputs = sizes
    roles = list(rows)
    places = [(expert, role) for expert, role in found if role in roles]
    taken = [found[place] for place in places]
    some = next(iter(found.values()))
    each = some.rank

    begins = {role: roles.index(role) * each for role in roles}
    of_a = tuple((expert, begins[role]) for expert, role in places)
    of_b = tuple((expert, begins[role], rows[role]) for expert, role in places)
    return new_pair(
        module,
        ([pair.a for pair in taken] or [some.a], (count * rank, inputs), StackedA((count, rank, inputs), of_a, each)),
        ([pair.b for pair in taken] or [some.b], (outputs, rank * count), StackedB((outputs, rank, count), of_b, each)),
        rank,
        alpha,
    )


def unshare(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield Tinker's experts as a pair for each: w1, w2 and w3 of three dimensions.

    A side with a single matrix is shared by all experts. Source: `expand_expert_lora_tensors` in
    tinker_cookbook/weights/_merge.py.
    """
    layers: dict[str, dict[str, LoraPair]] = defaultdict(dict)
    for pair in pairs:
        module, _, role = pair.module.rpartition(".")
        if module.endswith(".experts") and role in ("w1", "w2", "w3"):
            layers[module][role] = pair
    for module, found in layers.items():
        experts = names.experts(module)
        if experts is None or ExpertFormat.PER_EXPERT not in experts.formats or len(experts.names) != 3:
            continue
        if not all(_is_shared(role, pair, experts) for role, pair in found.items()):
            continue
        made = [
            _of_expert(f"{module}.{expert}", expert, role, found, experts)
            for expert in range(experts.count)
            for role in experts.names
        ]
        yield list(found.values()), made, "Tinker's experts split into a pair each"


def _is_shared(role: str, pair: LoraPair, experts: Experts) -> bool:
    inputs, outputs = sizes_of(role, experts)
    counts = {pair.a.shape[0], pair.b.shape[0]}
    sizes = pair.a.shape[1:], pair.b.shape[1:]
    return (
        experts.count in counts
        and counts <= {1, experts.count}
        and sizes == ((pair.rank, inputs), (outputs, pair.rank))
    )


def _of_expert(prefix: str, expert: int, role: str, found: Mapping[str, LoraPair], experts: Experts) -> NewPair:
    name, (inputs, outputs) = f"{prefix}.{experts.names[role]}", sizes_of(role, experts)
    pair = found.get(role)
    if pair is None:
        return zeros(name, next(iter(found.values())), inputs, outputs)
    a, b = (Rows(expert if side.shape[0] > 1 else 0, 1) for side in (pair.a, pair.b))
    shapes = (pair.rank, inputs), (outputs, pair.rank)
    return new_pair(name, ([pair.a], shapes[0], a), ([pair.b], shapes[1], b), pair.rank, pair.alpha)


def zeros(module: str, like: LoraPair, inputs: int, outputs: int, count: int = 1) -> NewPair:
    """Return a pair that adds nothing, of one expert or stacked of several."""
    a, b = (count * like.rank, inputs), (outputs, count * like.rank)
    return new_pair(module, ([like.a], a, Zeros(a)), ([like.b], b, Zeros(b)), like.rank, like.alpha)
