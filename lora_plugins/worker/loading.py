"""What is checked of a parsed adapter before it may enter the host cache: that all of it lands in the model, and fits.

Source: `LoRAModel` and `LoRALayerWeights` in vllm/lora, 0.32 and 0.33, of which only attributes are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lora_plugins.adapter.experts import check_experts
from lora_plugins.adapter.landing import check_sizes
from lora_plugins.adapter.model_modules import Kind, ModelModules
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, LoRAPluginsError, OutOfMemory
from lora_plugins.worker.host_memory import tensors_of

_TORCH_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # RuntimeErrors, of the CPU and of CUDA


def unmatched_modules(model: Any, matched: Mapping[str, Any]) -> list[str]:
    """Names of the adapter's modules that are none of `matched`, which maps the model's modules to their weights."""
    known = {id(weights) for weights in matched.values()}
    # Stacked experts: vLLM lists the tensors of `experts.base_layer` at `experts`; before 0.33 they stay there too.
    listed = {id(a) for weights in matched.values() if isinstance(weights.lora_a, list) for a in weights.lora_a}
    return sorted(
        name for name, weights in model.loras.items() if id(weights) not in known and id(weights.lora_a) not in listed
    )


def check_described(model: Any, manager: Any, modules: ModelModules) -> None:
    """Compare a parsed adapter's weights with the sizes of the whole model's modules, before vLLM merges them.

    Once vLLM has stacked experts, an error says no more which was wrong; and of what is larger than a layer that is
    divided among workers, each would take its part and never see the rest.

    Args:
        model: vLLM's `LoRAModel`.
        manager: its `LoRAModelManager`.
        modules: what `describe` said of it.

    Raises:
        IncompatibleAdapter: other sizes than the model's, or experts of which a part is missing.
    """
    pairs = {
        modules.key(name) or name: weights
        for name, weights in model.loras.items()
        if isinstance(weights.lora_a, torch.Tensor) and isinstance(weights.lora_b, torch.Tensor)
    }
    shapes = {name: (tuple(pair.lora_a.shape), tuple(pair.lora_b.shape)) for name, pair in pairs.items()}
    for name, shape in shapes.items():
        place = modules.places.get(name)
        if place is not None and place.kind is not Kind.EXPERTS and all(len(side) == 2 for side in shape):
            check_sizes(name, shape, place)
    check_experts(
        shapes,
        modules,
        ranks={name: int(pair.rank) for name, pair in pairs.items()},
        max_rank=manager.lora_config.max_lora_rank,
        elsewhere=_experts_elsewhere(manager, modules),
    )
    adapted = {place.module for name in pairs if (place := modules.places.get(name)) is not None}
    for name in adapted.intersection(modules.experts):
        _check_sharding(name, manager.modules[name], pairs, modules)
        _check_padding(name, manager.modules[name])


def _experts_elsewhere(manager: Any, modules: ModelModules) -> set[str]:
    """Names of the experts that vLLM loads on other workers only."""
    named: dict[str, list[str]] = {name: manager.packed_modules.get(name, []) for name in modules.experts}
    restrict = manager._restrict_to_local_experts  # noqa: SLF001 - as vLLM merges them
    return {part for name, parts in named.items() for part in set(parts).difference(restrict(name, parts))}


def _check_sharding(name: str, module: Any, pairs: Mapping[str, Any], modules: ModelModules) -> None:
    """With `--fully-sharded-loras` each worker has a part of the rank of experts' w13, which vLLM asserts."""
    if not module.fully_sharded or module.tp_size == 1:
        return
    for part, weights in pairs.items():
        place = modules.places.get(part)
        if place is not None and place.module == name and place.part != "w2" and weights.rank % module.tp_size:
            raise IncompatibleAdapter(
                f"rank {weights.rank} in module '{part}'",
                expected=f"a multiple of {module.tp_size}, the workers that --fully-sharded-loras divides it among",
                remedy="serve it without --fully-sharded-loras, or train it with such a rank",
            )


def _check_padding(name: str, module: Any) -> None:
    """VLLM before 0.33 takes a worker's part of experts at the padded size, and so other features than the worker's."""
    padded = module.moe_config.intermediate_size_per_partition
    own = module.moe_config.intermediate_size_per_partition_unpadded
    if module.tp_size > 1 and own not in (None, padded) and not hasattr(module, "_tp_shard_size"):
        raise IncompatibleAdapter(
            f"experts of '{name}', {own} features a worker, padded to {padded}",
            expected="experts that are not padded; this vLLM divides adapters at the padded size",
            remedy="upgrade to vLLM 0.33, or start it with --enable-expert-parallel or on one device",
        )


def check_fits(adapter: str, module_name: str, module: Any, weights: Any) -> None:
    """Compare a module's weights with its slot, so that no copy into it can fail or fill less than it should.

    A copy that fails in the engine loop, crashes the engine: there is no idle slot to try it in before.
    Mixtures of experts, whose slots are of other shapes, are compared by `check_described` alone.

    Raises:
        IncompatibleAdapter: another rank than fits, or other sizes than the module's. InvalidAdapter: A and B that are
            no pair of matrices. ValueError: packed weights that are not the module's slices together.
    """
    slots = _slots(module, weights)
    if slots is None:
        return
    slots_a, slots_b = slots
    lora_a, lora_b = weights.lora_a, weights.lora_b
    if len(slots_a) > 1 and (not isinstance(lora_b, list) or len(lora_b) != len(slots_a)):
        sides = (side if isinstance(side, list) else [side] for side in (lora_a, lora_b))
        lora_a, lora_b = module.expand_packed_lora(*sides)  # several slices in one pair; vLLM splits it as well
    for a, b in zip(*_sides_of(lora_a, lora_b), strict=False):
        _check_pair(adapter, module_name, a, b)  # whole: fully sharded, a worker has a part of A's rank, perhaps none
    if getattr(module, "tp_size", 1) > 1 and hasattr(module, "slice_lora_a"):
        lora_a, lora_b = module.slice_lora_a(lora_a), module.slice_lora_b(lora_b)
    sides_a, sides_b = _sides_of(lora_a, lora_b)
    if not len(sides_a) == len(sides_b) == len(slots_a):
        raise IncompatibleAdapter(
            f"weights of {module_name} for {len(sides_b)} slices",
            expected=f"{len(slots_a)}",
            remedy="serve it with the base model that it was trained on",
            adapter=adapter,
        )
    for a, b, slot_a, slot_b in zip(sides_a, sides_b, slots_a, slots_b, strict=True):
        for side, given, place in (("lora_A", a, slot_a), ("lora_B", b, slot_b)):
            if given is None:
                continue
            rows, columns = place.shape[-2:]
            rank, max_rank, size, wanted = (
                (given.shape[0], rows, given.shape[1], columns)
                if side == "lora_A"
                else (given.shape[1], columns, given.shape[0], rows)
            )
            if rank > max_rank or size != wanted:
                raise IncompatibleAdapter(
                    f"{side} of {module_name} with rank {rank} and {size} features",
                    expected=f"rank up to {max_rank} and {wanted} features",
                    remedy="serve it with the base model that it was trained on, or raise --max-lora-rank",
                    adapter=adapter,
                )


def _sides_of(*sides: Any) -> list[list[Any]]:
    return [side if isinstance(side, list) else [side] for side in sides]


def _slots(module: Any, weights: Any) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None:
    """Where each slice's A and B go, by their last two dimensions; None for a mixture of experts."""
    slots_a, slots_b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
    if isinstance(slots_a, torch.Tensor) and isinstance(slots_b, torch.Tensor):
        if slots_a.dim() == 3:  # an embedding's, which is looked up in: [slots, vocabulary, rank]
            return (slots_a.transpose(1, 2),), (slots_b,)
        return (slots_a,), (slots_b[:, :, : len(weights.lora_b)],)  # a head may know fewer words, as with vLLM
    if isinstance(slots_a, tuple) and isinstance(slots_b, tuple) and hasattr(module, "output_slices"):
        return slots_a, slots_b
    return None


def _check_pair(adapter: str, module_name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    if a is None and b is None:
        return
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        shapes = " and ".join("nothing" if side is None else str(tuple(side.shape)) for side in (a, b))
        raise InvalidAdapter(
            f"lora_A and lora_B of {module_name} with {shapes}",
            expected="(rank, features) and (features, rank)",
            remedy="save the adapter again with PEFT",
            adapter=adapter,
        )


def check_finite(adapter: str, model: Any) -> None:
    """Look at every weight once, in the precision that is served.

    Raises:
        InvalidAdapter: NaN or infinity, of which every answer would be made.
    """
    for name, weights in model.loras.items():
        for tensor in _sides(weights):
            if tensor.numel() and not all(torch.isfinite(edge) for edge in torch.aminmax(tensor)):
                raise InvalidAdapter(
                    f"NaN or infinity in the weights of {name}",
                    expected="finite values",
                    remedy="train it again, or set LORA_PLUGINS_CHECK_FINITE=0",
                    adapter=adapter,
                )


def _sides(weights: Any) -> Iterator[torch.Tensor]:
    yield from tensors_of(weights.lora_a)
    yield from tensors_of(weights.lora_b)


def explained(error: BaseException, adapter: str) -> LoRAPluginsError:
    """One of our errors for whatever vLLM raised over an adapter."""
    if isinstance(error, LoRAPluginsError):
        error.adapter = error.adapter or adapter
        return error
    if isinstance(error, MemoryError) or any(text in str(error) for text in _TORCH_OUT_OF_MEMORY):
        return OutOfMemory(
            f"no memory to bring it in ({str(error)[:200]})",
            expected="room beside the model and the adapters that are held",
            remedy="lower LORA_PLUGINS_HOST_MAX_BYTES or --max-cpu-loras",
            adapter=adapter,
        )
    if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
        return AdapterNotFound(
            f"files missing ({str(error)[:300]})",
            expected="the adapter's files where it was loaded from",
            remedy="put them back, or load it again",
            adapter=adapter,
        )
    return InvalidAdapter(
        f"an adapter that cannot be loaded ({type(error).__name__}: {str(error)[:300]})",
        expected="an adapter for this model",
        remedy="see the server's log; save the adapter again with PEFT",
        adapter=adapter,
    )
