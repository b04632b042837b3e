"""Whether vLLM's own loading takes an adapter whole: each tensor read, in a module that the engine has, and fitting it.

This is the other side of the comparison with our verdict, so it uses nothing of ours.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

_numbers = itertools.count(1_000_000)


def loads_whole(worker_manager: Any, directory: Path, *, is_3d: bool = False) -> str:
    """Empty if it does, else what happens to it.

    Args:
        worker_manager: vLLM's `WorkerLoRAManager` of a running engine, or a subclass of it.
        directory: the adapter's.
        is_3d: whether the request says that its experts are stacked.
    """
    from safetensors import safe_open
    from vllm.lora.layers import FusedMoE3DWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import is_base_embedding_weights
    from vllm.lora.worker_manager import WorkerLoRAManager

    vllms = object.__new__(WorkerLoRAManager)  # its own methods, on this engine's state
    vllms.__dict__.update(vars(worker_manager))
    vllms._lora_model_cls = LoRAModel
    manager = worker_manager._adapter_manager
    request = LoRARequest("other", next(_numbers), str(directory), is_3d_lora_weight=is_3d)
    try:
        lora = vllms._load_adapter(request)
    except Exception as error:
        return f"not loaded: {error}"
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    skipped = tuple(getattr(manager.model, "lora_skip_prefixes", None) or ())
    read = [
        name
        for name in shapes
        if not is_base_embedding_weights(name) and not LoRAModel._should_skip_module(name, list(skipped))
    ]
    halves = sorted(name for name, one in lora.loras.items() if one.lora_a is None or one.lora_b is None)
    if halves:
        return f"without A or B: {halves}"
    held = sum(2 for _ in lora.loras)
    if held != len(read) or not held:
        return f"{held} of {len(read)} tensors read"
    before = {name: (tuple(one.lora_a.shape), tuple(one.lora_b.shape)) for name, one in lora.loras.items()}
    wrong = sorted(name for name, (a, b) in before.items() if len(a) != 2 or len(b) != 2 or a[0] != b[1])
    if wrong:
        return f"no A and B of one rank: {wrong}"
    try:
        LoRAModelManager._create_merged_loras_inplace(manager, lora)
    except Exception as error:
        return f"not merged: {error!r}"
    known = set(manager.modules)
    stacked = {name for name, module in manager.modules.items() if isinstance(module, FusedMoE3DWithLoRA)}
    known |= {f"{name}.base_layer" for name in stacked & set(lora.loras)}  # alone it is left out
    if manager.is_pooling_model:
        # vLLM merges the parts of fused modules, and keeps them beside the whole.
        known |= {part for parts in manager.packed_modules.values() for part in parts}
        known |= {name.removeprefix("model.") for name in known}
    lost = sorted(set(lora.loras) - known)
    if lost:
        return f"in no module: {lost}"
    for name, module in manager.modules.items():
        problem = _misfit(manager, name, module, before)
        if problem:
            return problem
    return _experts_misfit(manager, lora)


def _misfit(manager: Any, name: str, module: Any, shapes: dict[str, Any]) -> str:
    """Why one of these shapes, by name, does not fit the slot of its part of the module; empty if all do."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    parts = manager.packed_modules.get(name, ())
    # vLLM's slots take a head that knows fewer words; smaller weights of other layers it takes too, and computes
    # something else.
    is_head = isinstance(module, LogitsProcessorWithLoRA)
    layer = getattr(module, "base_layer", None)
    sizes = _sizes(module, layer, len(parts) or 1)
    if sizes is None:
        return ""
    inputs, outputs = sizes
    for part, output in zip(parts or (name,), outputs, strict=True):
        a, b = shapes.get(part, (None, None))
        if a is None:
            continue
        if a[0] > manager.lora_config.max_lora_rank:
            return f"{part}: rank {a[0]}, the slots have {manager.lora_config.max_lora_rank}"
        if a[1] != inputs or b[0] > output or (b[0] < output and not is_head):
            return f"{part}: {a[1]} inputs and {b[0]} outputs, the layer has {inputs} and {output}"
    return ""


def _sizes(module: Any, layer: Any, parts: int) -> tuple[int, list[int]] | None:
    """Inputs and outputs of the layer that vLLM computes, from its own weight."""
    from vllm.lora.layers import FusedMoEWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

    if isinstance(module, FusedMoEWithLoRA):
        return None  # sizes of a stack are seen when it is written into a slot
    if isinstance(module, LogitsProcessorWithLoRA):
        return module.hidden_size, [module.base_layer.vocab_size]
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return layer.org_vocab_size, [layer.embedding_dim]
    sizes = list(getattr(layer, "output_sizes", None) or [layer.output_size])
    if parts == 1:
        return layer.input_size, [sum(sizes)]
    return (layer.input_size, sizes) if len(sizes) == parts else None


def _experts_misfit(manager: Any, lora: Any) -> str:
    """Write what is for fused experts into a slot of theirs, as vLLM does before a step, and empty it again."""
    from vllm.lora.layers import FusedMoEWithLoRA

    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(lora, name)
        if weights is None or not isinstance(module, FusedMoEWithLoRA):
            continue
        try:
            module.set_lora(0, weights.lora_a, weights.lora_b)
        except Exception as error:
            return f"{name}: {error!r}"
        module.reset_lora(0)
    return ""
