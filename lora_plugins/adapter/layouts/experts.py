"""Rules of a conversion for mixtures of experts: between a pair for each expert and pairs with all experts of a layer.

`conversion_plan.py` calls the rules in the API server and on the command line. In go pairs by names and shapes, and
where names land (`Names`); out come the taken pairs and the pairs in the engine's format (`Change`). `regroup` takes
pairs with all experts of a layer, mostly for engines that want a pair for each matrix of each expert; `stack` takes
these, for engines that want two pairs with all experts.

w1, w2 and w3 are an expert's gate_proj, down_proj and up_proj; w13 is w1 and w3 in one matrix. PEFT stacks experts that
Transformers 5 keeps in two parameters (`target_parameters`): w13 under `experts.base_layer`, w2 under `experts`. Of E
experts with rank r, A is `(E * r, in)`, expert by expert, and B `(out, r * E)`, with alternating experts. Source:
`_stack_moe_lora_weights` and `_convert_3d_to_2d_moe_lora` in vllm/lora/model_manager.py, 0.32; the second function
unstacks for engines of both formats.

PEFT before 0.19.1 took a parameter `(experts, out, in)` for `(experts, in, out)`, so its A is what B is now
(`ParamWrapper` in peft/tuners/lora/layer.py, 0.18.0 and 0.21.2; huggingface/peft#3165). Megatron-Bridge saves three
dimensions under the parameters' own names (`_convert_moe_experts_lora_to_vllm` of SkyRL 0.3.0 describes the form), and
Tinker under `experts.w1`, `.w2` and `.w3`; a side with a single matrix is shared by all experts
(`expand_expert_lora_tensors` in tinker_cookbook/weights/_merge.py). NeMo Automodel saves experts without gate_proj in
PEFT's old layout, with w1 alone as w13 (`_convert_lora_to_paramwrapper` in components/moe/state_dict_mixin.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lora_plugins.adapter.config import CONFIG_FILE, LAYOUT_KEY
from lora_plugins.adapter.layouts.tensors import Change, Names, NewPair, Part, Placed, Slice, new_pair
from lora_plugins.adapter.model_modules import ExpertFormat, Experts
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair
from lora_plugins.errors import IncompatibleAdapter

_ROLES = {"w1": "w1", "gate_proj": "w1", "w2": "w2", "down_proj": "w2", "w3": "w3", "up_proj": "w3"}
# Of pairs with all experts: the matrices that a pair of this name may hold. PEFT saves a parameter alone as `experts`.
_GROUPED = {
    "experts": ("w13", "w2"),
    "base_layer": ("w13",),
    "gate_up_proj": ("w13",),
    "down_proj": ("w2",),
    "w1": ("w1",),
    "w2": ("w2",),
    "w3": ("w3",),
}
FIRST_PRESENT = (0, 19, 1)  # of PEFT, with the present layout
_STACKED, _OLD = "stacked experts", "experts of PEFT before 0.19.1"
_MEGATRON, _TINKER = "Megatron-Bridge's experts", "Tinker's experts"
_FORMS = (_STACKED, _OLD, _MEGATRON, _TINKER)


class _View(NamedTuple):
    """A tensor read as an A (experts, ranks, inputs) or a B (experts, outputs, ranks), whatever its shape in the file.

    Attributes:
        shape: the shape to which the tensor is reshaped first.
        axes: the axes of `shape` that are the experts and the two others, in the order above.
    """

    tensor: TensorInfo
    shape: Sequence[int]
    axes: tuple[int, int, int] = (0, 1, 2)

    def of_expert(self, expert: int, rows: Slice) -> tuple[list[TensorInfo], Part]:
        """Return the source and the move for some rows of an expert's matrix."""
        at = expert if self.shape[self.axes[0]] > 1 else 0  # the only matrix is shared by all experts
        return [self.tensor], Part(((at, at + 1, 1), rows), tuple(self.shape), self.axes)


class _Grouped(NamedTuple):
    """A pair that holds one matrix (w1, w2, w3 or w13) of every expert of a layer."""

    pair: LoraPair
    a: _View
    b: _View


def check_ranks(pairs: Iterable[LoraPair], names: Names) -> None:
    """Refuse experts that fit with another rank than the configuration's.

    Raises:
        IncompatibleAdapter: names the rank, and the line of the configuration that says so.
    """
    for pair in paced(pairs):
        head, mark, rest = pair.module.partition(".experts")
        is_one, shape = rest.count(".") == 2, pair.a.shape  # of one expert: `.0.up_proj`
        # Most pairs are of one expert and have the rank of the configuration: they need no look at the model.
        experts = names.experts(head + mark) if mark and not (is_one and shape[0] == pair.rank) else None
        if experts is None:
            continue
        # The rank that A's shape shows: (rank, in), (experts, rank, in) or (experts * rank, in).
        rank = shape[0] if is_one else shape[1] if len(shape) == 3 else shape[0] // experts.count
        role, its = _ROLES.get(rest.rpartition(".")[2], ""), replace(pair, rank=rank)
        # `fits`: with this rank, the sizes are those of the model, so that only the rank is wrong. All experts have the
        # same sizes, so the number of the expert, 0, does not matter.
        fits = _fits(0, role, its, experts) if is_one else any(_read(its, experts, form) for form in _FORMS)
        if fits and rank != pair.rank:
            raise IncompatibleAdapter(
                f"experts '{pair.module}' of rank {rank}",
                expected=f"rank {pair.rank}, by the configuration",
                remedy=f'put "rank_pattern": {{"experts.*": {rank}}} into {CONFIG_FILE}, if the trainer has divided r '
                "by the active experts (NeMo Automodel, Megatron-Bridge)",
            )


def exchanged(pairs: Iterable[LoraPair], names: Names) -> frozenset[str]:
    """Return the names of A of stacked experts whose A and B an old PEFT has exchanged, although they may land.

    Raises:
        IncompatibleAdapter: neither sizes nor the configuration say whether A and B are exchanged.
    """
    layers: dict[str, list[LoraPair]] = defaultdict(list)
    for pair in paced(pairs):
        if pair.module.endswith((".experts", ".experts.base_layer")):
            layers[pair.module.removesuffix(".base_layer")].append(pair)
    found: set[str] = set()
    for module, its in layers.items():
        experts = names.experts(module)
        if experts is None or any(_read(pair, experts, _OLD) is None for pair in its):
            continue
        # A square parameter fits both ways. If the layer's other parameter fits one way only, that way holds for both;
        # else the version of PEFT decides.
        is_square = all(_read(pair, experts, _STACKED) for pair in its)
        if not is_square or _is_of_old_peft(module, experts.is_interleaved, names.config.peft_version):
            found |= {pair.a.name for pair in its}
    return frozenset(found)


def _is_of_old_peft(module: str, is_interleaved: bool, version: tuple[int, ...] | None) -> bool:
    """Whether PEFT of this version exchanged A and B of these experts; None stands for an unknown version.

    Interleaved experts (gpt-oss) are `(experts, in, out)` as an old PEFT assumes, so nothing was exchanged. 0.19.0 did
    exchange their A and B, but only with a Transformers that marks the parameters, so the version alone says nothing.
    """
    if version is None or (is_interleaved and version[:3] == (0, 19, 0)):
        raise IncompatibleAdapter(
            f"stacked experts '{module}' of a square matrix, which fit either way round, and no sign of the PEFT that "
            "wrote them",
            expected="the layout of PEFT before 0.19.1, or since",
            remedy=f'say which in {CONFIG_FILE}: "{LAYOUT_KEY}": "peft-0.18" or "peft-0.19.1" (NeMo Automodel has '
            "said so in automodel_peft_config.json)",
        )
    return version < FIRST_PRESENT and not is_interleaved


def regroup(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield the layers whose pairs hold all experts, in the engine's format: split into a pair each, or stacked.

    A layer that the engine takes as it is, or cannot take, is not yielded.
    """
    layers: dict[tuple[str, str], list[LoraPair]] = defaultdict(list)
    for pair in paced(pairs):
        module, _, leaf = pair.module.rpartition(".")
        if leaf == "experts" or pair.module.endswith(".experts.base_layer"):
            form = _OLD if pair.a.name in names.exchanged else _STACKED
            layers[pair.module.removesuffix(".base_layer"), form].append(pair)
        elif leaf in _GROUPED:
            layers[module, _TINKER if leaf in ("w1", "w2", "w3") else _MEGATRON].append(pair)
    for (module, form), its in layers.items():
        experts = names.experts(module)
        if experts is None:
            continue
        found = dict(read for pair in its if (read := _read(pair, experts, form)))
        # A pair of another shape, or two of the same matrix: leave the layer to `check_landing`.
        if len(found) != len(its):
            continue
        is_shared = any(1 == view.shape[view.axes[0]] < experts.count for _, *views in found.values() for view in views)
        if ExpertFormat.PER_EXPERT in experts.formats and experts.names:
            yield its, list(_one_by_one(module, found, experts)), f"{form} split into a pair each"
        # `_STACKED` is the engine's form already; a shared side cannot be stacked, and Tinker's form has no w13.
        elif ExpertFormat.STACKED in experts.formats and form in (_OLD, _MEGATRON) and not is_shared:
            yield its, list(_restacked(module, found, experts)), f"{form} stacked"


def _read(pair: LoraPair, experts: Experts, form: str) -> tuple[str, _Grouped] | None:
    """Return the role (w1, w2, w3 or w13) of a pair, and its views; None where no role fits the shapes in this form."""
    count, rank, shapes = experts.count, pair.rank, (pair.a.shape, pair.b.shape)
    for role in _GROUPED.get(pair.module.rpartition(".")[2], ()):
        inputs, outputs = _sizes(role, experts)
        if form == _STACKED and shapes == ((count * rank, inputs), (outputs, rank * count)):
            a, b = _View(pair.a, (count, rank, inputs)), _View(pair.b, (outputs, rank, count), (2, 0, 1))
        elif form == _OLD and shapes == ((count * rank, outputs), (inputs, rank * count)):
            # Exchanged: the tensor named B is the A, and the other way round.
            a, b = _View(pair.b, (inputs, rank, count), (2, 1, 0)), _View(pair.a, (count, rank, outputs), (0, 2, 1))
        elif form in (_MEGATRON, _TINKER) and (shapes[0][1:], shapes[1][1:]) == ((rank, inputs), (outputs, rank)):
            if {shapes[0][0], shapes[1][0]} not in ({count}, {1, count}):  # one side at most is shared
                continue
            a, b = _View(pair.a, pair.a.shape), _View(pair.b, pair.b.shape)
        else:
            continue
        return role, _Grouped(pair, a, b)
    return None


def _sizes(role: str, experts: Experts) -> tuple[int, int]:
    """Return the inputs and outputs of one expert's matrix."""
    inner, hidden = experts.intermediate_size, experts.hidden_size
    # w1 and w3 have no entry: both have the sizes at the end.
    return {"w2": (inner, hidden), "w13": (hidden, inner * len(_rows_in_w13(experts)))}.get(role, (hidden, inner))


def _rows_in_w13(experts: Experts) -> dict[str, Slice]:
    """Return which rows of w13's B belong to w1 and to w3."""
    inner = experts.intermediate_size
    if experts.names and "w3" not in experts.names:  # experts without gate_proj, whose w1 is up_proj
        return {"w1": (0, inner, 1)}
    # Interleaved: every second row is of w1, and the rows between are of w3.
    step, begin_of_w3 = (2, 1) if experts.is_interleaved else (1, inner)
    return {"w1": (0, step * inner, step), "w3": (begin_of_w3, 2 * inner, step)}


def _one_by_one(module: str, found: Mapping[str, _Grouped], experts: Experts) -> Iterator[NewPair]:
    """Yield a pair for each matrix of each expert; vLLM wants all three matrices, so a missing matrix is zeros."""
    like, rows_in_w13 = next(iter(found.values())).pair, _rows_in_w13(experts)
    for expert in range(experts.count):
        for role, leaf in experts.names.items():
            name, (inputs, outputs) = f"{module}.{expert}.{leaf}", _sizes(role, experts)
            rows = (0, outputs, 1)
            grouped = found.get(role)
            if grouped is None and role in rows_in_w13 and "w13" in found:
                grouped, rows = found["w13"], rows_in_w13[role]
            if grouped is None:
                yield _zeros(name, like, inputs, outputs)
                continue
            rank, alpha = grouped.pair.rank, grouped.pair.alpha
            (a, move_a), (b, move_b) = grouped.a.of_expert(expert, (0, rank, 1)), grouped.b.of_expert(expert, rows)
            yield new_pair(name, (a, (rank, inputs), move_a), (b, (outputs, rank), move_b), rank, alpha)


def _restacked(module: str, found: Mapping[str, _Grouped], experts: Experts) -> Iterator[NewPair]:
    """Yield w13 and w2 in PEFT's present form; a matrix that the adapter lacks is zeros."""
    count, like = experts.count, next(iter(found.values())).pair
    for role, name in (("w13", f"{module}.base_layer"), ("w2", module)):
        inputs, outputs = _sizes(role, experts)
        if role not in found:
            yield _zeros(name, like, inputs, outputs, count)
            continue
        pair, a, b = found[role]
        # B's axes in the order that PEFT has in the file: outputs, ranks, experts.
        of_experts, of_outputs, of_ranks = b.axes
        yield new_pair(
            name,
            ([a.tensor], (pair.rank * count, inputs), Part((), tuple(a.shape), a.axes)),
            ([b.tensor], (outputs, pair.rank * count), Part((), tuple(b.shape), (of_outputs, of_ranks, of_experts))),
            pair.rank,
            pair.alpha,
        )


def stack(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield pairs for each expert's matrices as stacked pairs, for an engine that takes the stacked format only."""
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
        # A stacked pair has a single rank, alpha and dtype for all experts.
        if len({(pair.rank, pair.alpha, pair.a.dtype, pair.b.dtype) for pair in found.values()}) > 1:
            continue
        yield list(found.values()), _stacked(module, found, experts, names), "experts stacked"


def _fits(expert: int, role: str, pair: LoraPair, experts: Experts) -> bool:
    """Whether a pair has the shapes of one expert's w1, w2 or w3, and the model has so many experts."""
    inputs, outputs = _sizes(role, experts)
    return expert < experts.count and (pair.a.shape, pair.b.shape) == ((pair.rank, inputs), (outputs, pair.rank))


def _stacked(module: str, found: Mapping[tuple[int, str], LoraPair], experts: Experts, names: Names) -> list[NewPair]:
    """Return two pairs, of w13 and of w2, with the matrices of `found`, by expert and role, and zeros elsewhere."""
    first = next(iter(found.values()))
    present = {role for _, role in found}
    rows = {role: its_rows for role, its_rows in _rows_in_w13(experts).items() if role in present}
    # w1 and w3 have an A each. w13's A has both, one below the other, and w13's B has zeros where w1's rows meet w3's
    # ranks, and the other way round. Twice the rank needs another alpha for the same scaling.
    rank = first.rank * max(1, len(rows))
    alpha = names.config.alpha_for(rank, first.rank, first.alpha)
    w13, w2 = _sizes("w13", experts), _sizes("w2", experts)
    of_w2: dict[str, Slice] = {"w2": (0, w2[1], 1)}
    return [
        _stack_of(f"{module}.base_layer", found, rows, sizes=(experts.count, *w13), rank=rank, alpha=alpha),
        _stack_of(module, found, of_w2, sizes=(experts.count, *w2), rank=first.rank, alpha=first.alpha),
    ]


def _stack_of(
    module: str,
    found: Mapping[tuple[int, str], LoraPair],
    rows: Mapping[str, Slice],
    *,
    sizes: tuple[int, int, int],
    rank: int,
    alpha: float,
) -> NewPair:
    """Return all experts' matrices of some roles as a pair; each role has its own ranks, and its own rows of B."""
    (count, inputs, outputs), roles = sizes, list(rows)
    some = next(iter(found.values()))
    taken, of_a, of_b = [], [], []
    for (expert, role), pair in found.items():
        if role in rows:
            begin = roles.index(role) * some.rank
            of_expert, ranks = (expert, expert + 1, 1), (begin, begin + some.rank, 1)
            taken.append(pair)
            of_a.append((of_expert, ranks))
            of_b.append((rows[role], ranks, of_expert))
    sources = taken or [some]  # without a matrix of these roles: some pair, for the dtype of the zeros
    return new_pair(
        module,
        ([pair.a for pair in sources], (count * rank, inputs), Placed((count, rank, inputs), tuple(of_a))),
        ([pair.b for pair in sources], (outputs, rank * count), Placed((outputs, rank, count), tuple(of_b))),
        rank,
        alpha,
    )


def _zeros(module: str, like: LoraPair, inputs: int, outputs: int, count: int = 1) -> NewPair:
    """Return a pair that adds nothing, of `count` experts; rank, alpha and dtypes are those of the pair `like`."""
    a, b = (count * like.rank, inputs), (outputs, count * like.rank)
    return new_pair(module, ([like.a], a, Placed(a)), ([like.b], b, Placed(b)), like.rank, like.alpha)
