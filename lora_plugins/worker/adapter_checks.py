"""Checks a parsed adapter before it enters a worker's host cache: every module must land in the model, and fit.

The loading thread calls `check_described` before vLLM merges an adapter's modules, then `check_slots` and
`check_finite`. Each raises an error of ours, or returns. `explained` makes an error of ours of any error that a load
raised.

Source: `LoRAModel` and `LoRALayerWeights` in vllm/lora, 0.32 and 0.33; only attributes are read.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_plugins.adapter.complete import ReadPair
from lora_plugins.adapter.landing import check_pairs
from lora_plugins.adapter.model_modules import ModelModules, ModuleKind, ModulePlace
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    LoRAPluginsError,
    OutOfMemory,
    SourceUnavailable,
)
from lora_plugins.kernels.layers import sides_of_slices, stacks
from lora_plugins.worker.host_memory import tensors_of

_Shape = tuple[int, ...]

_TORCH_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # messages of RuntimeErrors, of the CPU and of CUDA


def check_described(
    model: Any, manager: Any, modules: ModelModules, *, is_whole_model: bool = True, refuse_unmatched: bool = True
) -> tuple[str, ...]:
    """Compare a parsed adapter with the whole model's modules, before vLLM merges the adapter; return notes.

    After vLLM has stacked experts, no error can name the wrong module. A layer that is divided among workers would hide
    too large weights: each worker takes its part, and never sees the rest.

    Args:
        model: vLLM's `LoRAModel`.
        manager: its `LoRAModelManager`.
        modules: `describe`'s answer for the model.
        is_whole_model: whether these are all modules of the model.
        refuse_unmatched: see `check_pairs`.

    Raises:
        IncompatibleAdapter, InvalidAdapter: as `check_pairs`.
    """
    # A single pair for a module that adapters usually name by its parts: vLLM divides the pair, so only the slot knows.
    undivided = {id(manager._get_lora_layer_weights(model, name)) for name in _modules_of_parts(modules)}  # noqa: SLF001
    pairs = [
        ReadPair(name, name, _shape(weights.lora_a), _shape(weights.lora_b), int(weights.rank))
        for name, weights in model.loras.items()
        # A list: the caller has merged the adapter already.
        if id(weights) not in undivided and not isinstance(weights.lora_a, list)
    ]
    if not pairs:
        return ()
    notes = check_pairs(
        pairs,
        modules,
        elsewhere=_experts_elsewhere(manager, modules),
        is_whole_model=is_whole_model,
        refuse_unmatched=refuse_unmatched,
    )
    landed = [(pair, place) for pair in pairs if (place := modules.place(pair.name)) is not None]
    for pair, place in landed:
        _check_rank(pair, place, manager.lora_config.max_lora_rank)
        if place.kind is ModuleKind.EXPERTS:
            _check_sharding(pair, place, manager.modules[place.module])
            _check_padding(place.module, manager.modules[place.module])
    return notes


def _shape(side: Any) -> _Shape:
    return () if side is None else tuple(side.shape)


def _experts_elsewhere(manager: Any, modules: ModelModules) -> set[str]:
    """Return the names of the experts that vLLM loads on other workers only."""
    named: dict[str, list[str]] = {name: manager.packed_modules.get(name, []) for name in modules.experts}
    restrict = manager._restrict_to_local_experts  # noqa: SLF001 - as vLLM merges them
    return {part for name, parts in named.items() for part in set(parts).difference(restrict(name, parts))}


def _check_rank(pair: ReadPair, place: ModulePlace, max_rank: int) -> None:
    # A of stacked experts has the rank times their number.
    rank = pair.rank if place.kind is ModuleKind.EXPERTS else pair.a[0]
    if rank > max_rank:
        raise IncompatibleAdapter(
            f"rank {rank} in module '{pair.name}'", expected=f"at most {max_rank}", remedy="raise --max-lora-rank"
        )


def _check_sharding(pair: ReadPair, place: ModulePlace, module: Any) -> None:
    """Refuse a rank of experts' w13 that `--fully-sharded-loras` cannot divide among workers; vLLM only asserts."""
    if module.fully_sharded and module.tp_size > 1 and place.part != "w2" and pair.rank % module.tp_size:
        raise IncompatibleAdapter(
            f"rank {pair.rank} in module '{pair.name}'",
            expected=f"a multiple of {module.tp_size}, the workers that --fully-sharded-loras divides it among",
            remedy="serve it without --fully-sharded-loras, or train it with such a rank",
        )


def _check_padding(name: str, module: Any) -> None:
    """Refuse padded experts on several workers before vLLM 0.33.

    vLLM before 0.33 takes a worker's part of the experts at the padded size, and so other features than the worker's.
    """
    padded = module.moe_config.intermediate_size_per_partition
    own = module.moe_config.intermediate_size_per_partition_unpadded
    if module.tp_size > 1 and own not in (None, padded) and not hasattr(module, "_tp_shard_size"):
        raise IncompatibleAdapter(
            f"experts of '{name}', {own} features a worker, padded to {padded}",
            expected="experts that are not padded; this vLLM divides adapters at the padded size",
            remedy="upgrade to vLLM 0.33, or start it with --enable-expert-parallel or on one device",
        )


def check_slots(model: Any, manager: Any, modules: ModelModules) -> None:
    """Compare merged weights with the slots of the modules whose sizes only the engine knows.

    A copy that fails in the engine loop crashes the engine, and there is no idle slot for a trial copy.

    Raises:
        IncompatibleAdapter: too large a rank, or other sizes than the module's.
    """
    unsaid = {place.module for place in modules.places.values() if None in (place.in_features, place.out_features)}
    for name in sorted(unsaid | _modules_of_parts(modules)):
        weights = manager._get_lora_layer_weights(model, name)  # noqa: SLF001 - as vLLM looks up
        if weights is not None:
            check_slot(name, manager.modules[name], weights)


def _modules_of_parts(modules: ModelModules) -> set[str]:
    """Return modules that `places` has by their parts only; not experts, whose formats vLLM itself knows."""
    linear = {place.module for place in modules.places.values() if place.kind is ModuleKind.LINEAR}
    return linear.difference(modules.places)


def check_slot(name: str, module: Any, weights: Any) -> None:
    """Compare one module's weights with its slot.

    Raises:
        IncompatibleAdapter: see `check_slots`.
    """
    parts = stacks(module)
    if parts is None:
        return
    slots = [(tuple(a.shape[2:]), tuple(b.shape[2:])) for a, b in zip(*parts, strict=True)]
    sides = sides_of_slices(module, len(slots), weights.lora_a, weights.lora_b)
    given = [] if sides is None else [(_shape(a), _shape(b)) for a, b in zip(*sides, strict=True)]
    if not given or not all(_fits(*pair, *slot) for pair, slot in zip(given, slots, strict=True)):
        raise IncompatibleAdapter(
            f"A and B of {name} with shapes {given or 'of another number of slices'}",
            expected=f"{slots}, or a smaller rank",
            remedy="serve it with the base model that it was trained on, or raise --max-lora-rank",
        )


def _fits(a: _Shape, b: _Shape, slot_a: _Shape, slot_b: _Shape) -> bool:
    """Whether A (rank, features) and B (features, rank), `()` for a missing side, fill a slot but for its rank."""
    return (not a or (a[0] <= slot_a[0] and a[1] == slot_a[1])) and (not b or (b[0] == slot_b[0] and b[1] <= slot_b[1]))


def check_finite(model: Any) -> None:
    """Look at every weight once, in the precision that is served.

    Raises:
        InvalidAdapter: NaN or infinity, which would reach every answer.
    """
    for name, weights in model.loras.items():
        for tensor in (*tensors_of(weights.lora_a), *tensors_of(weights.lora_b)):
            require_finite(tensor, name)


def require_finite(tensor: torch.Tensor, name: str) -> None:
    """Do as `check_finite`, for one tensor of the weights of this name."""
    # `aminmax` reads each weight once and passes NaN on: two numbers to test, without a mask as large as the tensor.
    if tensor.numel() and not all(torch.isfinite(edge) for edge in torch.aminmax(tensor)):
        raise InvalidAdapter(
            f"NaN or infinity in the weights of {name}",
            expected="finite values",
            remedy="train it again, or set LORA_PLUGINS_CHECK_FINITE=0",
        )


def explained(error: BaseException, adapter: str) -> LoRAPluginsError:
    """Return an error of ours for any error over an adapter, with the adapter's name where the error has none."""
    ours = error if isinstance(error, LoRAPluginsError) else _error_of_ours(error)
    ours.adapter = ours.adapter or adapter
    return ours


def _error_of_ours(error: BaseException) -> LoRAPluginsError:
    if isinstance(error, MemoryError) or any(text in str(error) for text in _TORCH_OUT_OF_MEMORY):
        return OutOfMemory(
            f"no memory to bring it in ({str(error)[:200]})",
            expected="room beside the model and the adapters that are held",
            remedy="lower LORA_PLUGINS_HOST_MAX_BYTES or --max-cpu-loras",
        )
    if any(isinstance(one, (FileNotFoundError, NotADirectoryError)) for one in (error, error.__cause__)):
        return AdapterNotFound(
            f"files missing ({str(error)[:300]})",
            expected="the adapter's files where it was loaded from",
            remedy="put them back, or load it again",
        )
    # vLLM may raise another error from the OSError; the errno is on the cause then.
    failed = next((one for one in (error, error.__cause__) if isinstance(one, OSError) and one.errno), None)
    if failed is not None:
        return SourceUnavailable(
            f"files that cannot be read now ({failed.strerror or type(failed).__name__})",
            expected="a store that can be read",
            remedy="ask again; look at the mount, the disk and the limits of LORA_PLUGINS_STORE_DIR's machine",
        )
    return InvalidAdapter(
        f"an adapter that cannot be loaded ({type(error).__name__}: {str(error)[:300]})",
        expected="an adapter for this model",
        remedy="see the server's log; save the adapter again with PEFT",
    )
