"""All experts of a layer in two pairs of another order than the engine's: of an old PEFT, and of Megatron-Bridge.

PEFT before 0.19.1 took a parameter `(experts, out, in)` for `(experts, in, out)`, so its A is what B is now
(`ParamWrapper` in peft/tuners/lora/layer.py, 0.18.0 and 0.21.2; huggingface/peft#3165). Megatron-Bridge saves three
dimensions under the parameters' own names (`_convert_moe_experts_lora_to_vllm` of SkyRL 0.3.0 describes the form).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from lora_plugins.adapter.layouts.experts import rows_in_w13, sizes_of, zeros
from lora_plugins.adapter.layouts.moves import OfExpert
from lora_plugins.adapter.layouts.names import Names
from lora_plugins.adapter.layouts.tensors import Change, NewPair, new_pair
from lora_plugins.adapter.model_modules import ExpertFormat, Experts
from lora_plugins.adapter.pace import paced
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.weights import LoraPair

# A tensor as (experts, rank, inputs) or (experts, outputs, rank): its source, the source's shape, and the axes' order.
_View = tuple[TensorInfo, tuple[int, int, int], tuple[int, int, int]]
_GROUPED = {"gate_up_proj": "w13", "down_proj": "w2"}


def exchanged(pairs: Iterable[LoraPair], names: Names) -> frozenset[str]:
    """Return the names of A of stacked experts whose A and B an old PEFT has exchanged, although they may land."""
    layers: dict[str, list[LoraPair]] = defaultdict(list)
    for pair in paced(pairs):
        if pair.module.endswith((".experts", ".experts.base_layer")):
            layers[pair.module.removesuffix(".base_layer")].append(pair)
    found: set[str] = set()
    for module, its in layers.items():
        experts = names.experts(module)
        if experts is None or any(_role(pair, experts) is None for pair in its):
            continue
        # A square parameter fits both ways: then another of the layer decides, or the PEFT that has saved it.
        square = [_is_stacked(pair, experts) for pair in its]
        if not all(square) or (names.is_of_old_peft and not experts.is_interleaved):
            found |= {pair.a.name for pair in its}
    return frozenset(found)


def rearrange(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield such experts in the format of the engine."""
    layers: dict[tuple[str, str], dict[str, LoraPair]] = defaultdict(dict)
    for pair in pairs:
        module, _, leaf = pair.module.rpartition(".")
        role, whose = _GROUPED.get(leaf), "Megatron-Bridge's experts"
        if pair.a.name in names.exchanged:
            module, whose = pair.module.removesuffix(".base_layer"), "experts of PEFT before 0.19.1"
            role = _role(pair, its) if (its := names.experts(module)) else None
        if role and (experts := names.experts(module)) and _views(role, pair, experts):
            layers[module, whose][role] = pair
    for (module, whose), found in layers.items():
        experts = names.experts(module)
        if experts and ExpertFormat.PER_EXPERT in experts.formats and len(experts.names) == 3:
            yield list(found.values()), list(_one_by_one(module, found, experts)), f"{whose} split into a pair each"
        elif experts and ExpertFormat.STACKED in experts.formats:
            yield list(found.values()), list(_stacked(module, found, experts)), f"{whose} stacked"


def _sizes(role: str, experts: Experts) -> tuple[int, int]:
    inner, hidden = experts.intermediate_size, experts.hidden_size
    return (inner, hidden) if role == "w2" else (hidden, 2 * inner)


def _is_stacked(pair: LoraPair, experts: Experts) -> bool:
    rank = experts.count * pair.rank
    shapes = pair.a.shape, pair.b.shape
    return any(shapes == ((rank, i), (o, rank)) for i, o in (_sizes(role, experts) for role in ("w13", "w2")))


def _role(pair: LoraPair, experts: Experts) -> str | None:
    """Return which parameter an exchanged pair is of; None where the pair is not exchanged."""
    roles = ("w13",) if pair.module.endswith(".base_layer") else ("w2", "w13")
    rank = experts.count * pair.rank
    shapes = pair.a.shape, pair.b.shape
    return next((one for one in roles for i, o in [_sizes(one, experts)] if shapes == ((rank, o), (i, rank))), None)


def _views(role: str, pair: LoraPair, experts: Experts) -> tuple[_View, _View] | None:
    inputs, outputs = _sizes(role, experts)
    count, rank = experts.count, pair.rank
    of_a, of_b = (count, rank, inputs), (count, outputs, rank)
    if (pair.a.shape, pair.b.shape) == (of_a, of_b):
        return (pair.a, of_a, (0, 1, 2)), (pair.b, of_b, (0, 1, 2))
    if (pair.a.shape, pair.b.shape) == ((count * rank, outputs), (inputs, rank * count)):
        return (pair.b, (inputs, rank, count), (2, 1, 0)), (pair.a, (count, rank, outputs), (0, 2, 1))
    return None


def _one_by_one(module: str, found: dict[str, LoraPair], experts: Experts) -> Iterator[NewPair]:
    rows = {**rows_in_w13(experts), "w2": (0, experts.hidden_size, 1)}
    for expert in range(experts.count):
        for role, leaf in experts.names.items():
            name, (inputs, outputs) = f"{module}.{expert}.{leaf}", sizes_of(role, experts)
            stacked = "w2" if role == "w2" else "w13"
            pair = found.get(stacked)
            views = pair and _views(stacked, pair, experts)
            if not pair or not views:
                yield zeros(name, next(iter(found.values())), inputs, outputs)
                continue
            (a, a_shape, a_axes), (b, b_shape, b_axes) = views
            yield new_pair(
                name,
                ([a], (pair.rank, inputs), OfExpert(a_shape, a_axes, expert, (0, pair.rank, 1))),
                ([b], (outputs, pair.rank), OfExpert(b_shape, b_axes, expert, rows[role])),
                pair.rank,
                pair.alpha,
            )


def _stacked(module: str, found: dict[str, LoraPair], experts: Experts) -> Iterator[NewPair]:
    count, like = experts.count, next(iter(found.values()))
    for role, name in (("w13", f"{module}.base_layer"), ("w2", module)):
        inputs, outputs = _sizes(role, experts)
        pair = found.get(role)
        views = pair and _views(role, pair, experts)
        if not pair or not views:
            yield zeros(name, like, inputs, outputs, count)
            continue
        (a, a_shape, a_axes), (b, b_shape, (of_experts, of_outputs, of_ranks)) = views
        rank = pair.rank * count
        yield new_pair(
            name,
            ([a], (rank, inputs), OfExpert(a_shape, a_axes)),
            ([b], (outputs, rank), OfExpert(b_shape, (of_outputs, of_ranks, of_experts))),
            pair.rank,
            pair.alpha,
        )
