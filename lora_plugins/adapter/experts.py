"""Whether an adapter's mixture of experts is whole, and fits the model's, in a format that the engine takes.

Source: how vLLM 0.32 stacks and slices experts: `_create_merged_loras_inplace`, `_stack_moe_lora_weights` and
`_convert_3d_to_2d_moe_lora` in vllm/lora/model_manager.py, `set_lora` in vllm/lora/layers/fused_moe.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lora_plugins.adapter.model_modules import ExpertFormat, ModelModules, ModuleKind, ModulePlace
from lora_plugins.adapter.pace import paced
from lora_plugins.errors import IncompatibleAdapter

Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of A and of B

_REMEDY = "serve it with the base model that it was trained on"


def check_experts(
    shapes: Mapping[str, Shapes],
    modules: ModelModules,
    *,
    ranks: Mapping[str, int],
    max_rank: int | None = None,
    elsewhere: Collection[str] = (),
    about: str = "",
) -> None:
    """Compare an adapter's tensors for experts with the model's experts.

    Args:
        shapes: by the names of `modules.places`; other kinds of modules may be among the names.
        modules: the engine's.
        ranks: by the same names, the configuration's rank.
        max_rank: the largest that fits; None where others compare the rank.
        elsewhere: names that other workers load.
        about: the base models that the adapter names and the server serves.

    Raises:
        IncompatibleAdapter: other shapes than the model's, or experts with a missing part.
    """
    found: dict[str, set[bool]] = {}
    for name, (a, b) in paced(shapes.items()):
        place = modules.places.get(name)
        if place is None or place.kind is not ModuleKind.EXPERTS:
            continue
        found.setdefault(place.module, set()).add(place.stacked > 1)
        rank = ranks[name]
        wanted = _shapes(place, modules, rank)
        if (tuple(a), tuple(b)) != wanted:
            raise IncompatibleAdapter(
                f"A {list(a)} and B {list(b)} in module '{name}'{about}",
                expected=f"A {list(wanted[0])} and B {list(wanted[1])}, of rank {rank} by the configuration",
                remedy=_REMEDY,
            )
        check_rank(name, rank, max_rank)
    if found:
        _check_whole(shapes, modules, found, elsewhere, about)


def check_rank(name: str, rank: int, max_rank: int | None) -> None:
    """Refuse a module's rank above the largest; None: others compare the rank.

    Raises:
        IncompatibleAdapter: the rank is larger.
    """
    if max_rank is not None and rank > max_rank:
        raise IncompatibleAdapter(
            f"rank {rank} in module '{name}'", expected=f"at most {max_rank}", remedy="raise --max-lora-rank"
        )


def _shapes(place: ModulePlace, modules: ModelModules, rank: int) -> Shapes:
    # Experts always have both sizes; 0 matches no tensor.
    inputs, outputs = place.in_features or 0, place.out_features or 0
    experts = modules.experts[place.module]
    # Tinker's form shares a side among all experts: w1 and w3 share A, w2 shares B.
    if ExpertFormat.SHARED in experts.formats:
        of_a, of_b = (experts.count, 1) if place.part == "w2" else (1, experts.count)
        return (of_a, rank, inputs), (of_b, outputs, rank)
    return (rank * place.stacked, inputs), (outputs, rank * place.stacked)


def _check_whole(
    shapes: Mapping[str, Shapes],
    modules: ModelModules,
    found: Mapping[str, set[bool]],
    elsewhere: Collection[str],
    about: str,
) -> None:
    """Refuse a part of a layer's experts: vLLM takes all parts of all experts, or none, in a single format."""
    for name, place in paced(modules.places.items()):
        if place.kind is not ModuleKind.EXPERTS or place.module not in found:
            continue
        of_formats = found[place.module]
        if len(of_formats) > 1:
            raise IncompatibleAdapter(
                f"experts of '{place.module}' both one by one and stacked{about}",
                expected="one format",
                remedy="save them in one format",
            )
        if (place.stacked > 1) in of_formats and name not in shapes and name not in elsewhere:
            raise IncompatibleAdapter(
                f"experts of '{place.module}' without '{name}'{about}",
                expected="all parts of all experts of a layer, or none",
                remedy="train it with gate_proj, up_proj and down_proj of every expert, or with none",
            )
