"""Modules that vLLM wraps for LoRA without ever calling the wrapper: adapters of such modules have no effect.

With multi-head latent attention (MLA: DeepSeek-V2 and -V3, Kimi, GLM-5), attention keeps the `kv_b_proj` from before
vLLM wrapped the layer. Attention calls the old layer for prompts, and computes decode with weights made from the old
layer (`W_UK`, `W_UV`). Source: `MLAAttention` in vllm/model_executor/layers/attention/mla_attention.py, 0.30 to 0.33;
vllm#48974.

Layers of state spaces and linear attention read the weight of their depthwise convolution (`conv1d`) and call a kernel.

Counting calls while an engine starts would not tell. A compiled model from a cache calls no module in Python. vLLM's
profiling run has no attention metadata, so attention computes nothing; an eager engine on the CPU has no profiling run.
A layer may also call its wrapper for prompts and not for decode, as the layer of vllm/models/kimi_k3 would. The holder
of a layer is the same in each engine, and `tests/models/test_computed_modules.py` compares `uncalled` with real
requests.

Touches:
    vllm.model_executor.layers.attention.mla_attention: MLAAttention{impl, kv_b_proj}
    vllm.lora.model_manager: LoRAModelManager{model, modules}
Why: vLLM takes an adapter of these and computes nothing of it; it is refused by name.
Until: vLLM computes adapters of kv_b_proj with MLA (vllm#48974).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def uncalled(manager: Any) -> frozenset[str]:
    """Return the names of such modules, from `manager.modules`.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.
    """
    names: dict[int, str] = {}
    found: set[str] = set()
    for name, module in manager.modules.items():
        layer = getattr(module, "base_layer", module)
        # Attention may hold the wrapper or the layer inside.
        names |= {id(module): name, id(layer): name}
        if _is_convolution(layer):
            found.add(name)
    found.update(names[id(held)] for held in _held_by_attention(manager.model) if id(held) in names)
    return frozenset(found)


def _is_convolution(layer: Any) -> bool:
    """Whether a linear layer only holds a depthwise convolution's weight, of vLLM's shape (channels, 1, kernel)."""
    shape: tuple[int, ...] = tuple(getattr(getattr(layer, "weight", None), "shape", ()))
    return len(shape) == 3 and shape[1] == 1


def _held_by_attention(model: Any) -> Iterator[Any]:
    """Yield the attributes of attention's implementations: no modules, so vLLM wraps nothing inside them.

    Some implementations leave `kv_b_proj` to the layer, so the layer's own `kv_b_proj` comes too.
    """
    for layer in model.modules():
        # `vars`, not `getattr`: a module's `__getattr__` also finds submodules and parameters, and raises for other
        # names.
        implementation = vars(layer).get("impl")
        if hasattr(implementation, "__dict__"):
            yield from vars(implementation).values()
            yield getattr(layer, "kv_b_proj", None)
