"""Modules that vLLM computes otherwise than an adapter of them was trained, and adds the adapter to all the same.

Llama 4's queries and keys (`permute_qk_weight_for_rotary` in vllm/model_executor/models/llama4.py) and, with partial
rotation, K2 Horizon's (`fold_rope_weights` in k2_horizon.py, 0.32) are turned so that a faster kernel can rotate them.
vLLM adds an adapter's rows where they stand in the checkpoint, and so to the wrong features.

Of its Transformers backend (0.32), embeddings with a scale inside (VaultGemma) are scaled without the adapter.

Touches:
    vllm.model_executor.models.llama4: Llama4ForCausalLM.permute_qk_weight_for_rotary(self, name, loaded_weight)
    vllm.lora.model_manager: LoRAModelManager{model, modules}
Why: vLLM takes an adapter of these and adds it to other features, or unscaled; it is refused by name.
Until: vLLM does with an adapter's rows what it does with the weight's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_TURNED = ("q_proj", "k_proj")


def computed_otherwise(manager: Any, places: Collection[str]) -> frozenset[str]:
    """Return those of `places` that are such modules.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.
        places: names of modules and of parts of fused ones.
    """
    holders = [
        name
        for name, module in manager.model.named_modules()
        if hasattr(module, "permute_qk_weight_for_rotary") or _folds(module)
    ]
    turned = {
        place
        for place in places
        if place.endswith(_TURNED) and any(not name or place.startswith(f"{name}.") for name in holders)
    }
    layers = {name: getattr(module, "base_layer", None) for name, module in manager.modules.items()}
    return frozenset(turned | {name for name, layer in layers.items() if hasattr(layer, "embed_scale")})


def _folds(module: Any) -> bool:
    """Whether an attention layer rotates a part of each head, and has its rows put so that the part comes first."""
    whole = getattr(module, "head_dim", None)
    return bool(getattr(module, "fold_rope_weights", False)) and getattr(module, "rope_head_dim", whole) != whole
