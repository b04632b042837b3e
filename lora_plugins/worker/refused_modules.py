"""Modules of a model whose adapters are refused by name, because vLLM computes nothing for them, or something else.

`model_description.py` asks once for a model, after vLLM has wrapped the model's layers: in a worker at start, and in
the process that describes the model to the API server. Each function takes vLLM's `LoRAModelManager` and returns names
of modules; a refused adapter's error gives the reason (`Unadapted`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from lora_plugins.adapter.model_modules import Unadapted


def unadapted(manager: Any) -> dict[str, Unadapted]:
    """Return why modules take no adapter in this engine, by module name; parts of fused modules have names too.

    Source: `LoRAModelManager._create_lora_modules` in vllm/lora/model_manager.py, 0.30 to 0.33, passes over such
    modules with a log line at most. vLLM then leaves out the adapters' weights for the modules, without a word.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.

    Touches:
        vllm.lora.model_manager:
            LoRAModelManager{model, modules, lora_config, supported_lora_modules, packed_modules_mapping, mm_mapping,
                _get_punica_wrapper(self, module_name), _match_target_modules(self, module_name)}
        vllm.lora.utils: is_supported_lora_module(module_name, module, supported_lora_modules)
        vllm.config.lora: LoRAConfig{enable_tower_connector_lora}
        vllm.model_executor.models.interfaces: SupportsMultiModal{supports_tower_connector_lora}
    Why: an adapter for a module that this engine does not adapt is refused with the flag that it needs.
    Until: vLLM says which of an adapter's modules it leaves out, and why.
    """
    from torch import nn
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kinds = LinearBase, VocabParallelEmbedding, MoERunner, nn.Linear, nn.Embedding
    found: dict[str, Unadapted] = {}
    passed: set[str] = set()  # modules that are settled: everything inside is vLLM's
    for name, module in manager.model.named_modules(remove_duplicate=False):
        # `named_modules` yields parents before children, so one step up is enough.
        if name in manager.modules or name.rpartition(".")[0] in passed:
            passed.add(name)
        elif isinstance(module, kinds):
            passed.add(name)
            parent, _, last = name.rpartition(".")
            parts = manager.packed_modules_mapping.get(last, []) if not isinstance(module, MoERunner) else []
            for part in (last, *parts):
                found[f"{parent}.{part}" if parent else part] = _reason(manager, name, module)
    return found


def _reason(manager: Any, name: str, module: Any) -> Unadapted:
    from vllm.lora.utils import is_supported_lora_module

    if not is_supported_lora_module(name, module, manager.supported_lora_modules):
        return Unadapted.KIND
    config = manager.lora_config
    if manager._get_punica_wrapper(name) is None:  # noqa: SLF001 - as vLLM calls; a text model has one for all
        is_off = manager.model.supports_tower_connector_lora and not config.enable_tower_connector_lora
        prefixes = (*manager.mm_mapping.tower_model, *manager.mm_mapping.connector)
        return Unadapted.TOWER if is_off and name.startswith(prefixes) else Unadapted.KIND
    is_target = manager._match_target_modules(name)  # noqa: SLF001 - without named targets every module matches
    return Unadapted.KIND if is_target else Unadapted.TARGET


def uncalled(manager: Any) -> frozenset[str]:
    """Return the modules that vLLM wraps without ever calling the wrapper, from `manager.modules`.

    With multi-head latent attention (MLA: DeepSeek-V2 and -V3, Kimi, GLM-5), attention keeps the `kv_b_proj` from
    before vLLM wrapped the layer. Attention calls the old layer for prompts, and computes decode with weights made from
    the old layer (`W_UK`, `W_UV`). Source: `MLAAttention` in vllm/model_executor/layers/attention/mla_attention.py,
    0.30 to 0.33; vllm#48974.

    Layers of state spaces and linear attention read the weight of their depthwise convolution (`conv1d`) and call a
    kernel.

    Counting calls while an engine starts would not tell. A compiled model from a cache calls no module in Python.
    vLLM's profiling run has no attention metadata, so attention computes nothing; an eager engine on the CPU has no
    profiling run. A layer may also call its wrapper for prompts and not for decode, as the layer of
    vllm/models/kimi_k3 would. The holder of a layer is the same in each engine, and
    `tests/models/test_computed_modules.py` compares `uncalled` with real requests.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.

    Touches:
        vllm.model_executor.layers.attention.mla_attention: MLAAttention{impl, kv_b_proj}
        vllm.lora.model_manager: LoRAModelManager{model, modules}
    Why: vLLM takes an adapter of such modules and computes nothing of the adapter, so we refuse the adapter by name.
    Until: vLLM computes adapters of kv_b_proj with MLA (vllm#48974).
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


def computed_otherwise(manager: Any, places: Collection[str]) -> frozenset[str]:
    """Return those of `places` that vLLM computes otherwise than an adapter of them was trained.

    Llama 4's queries and keys (`permute_qk_weight_for_rotary` in vllm/model_executor/models/llama4.py) and, with
    partial rotation, K2 Horizon's (`fold_rope_weights` in k2_horizon.py, 0.32) are turned so that a faster kernel can
    rotate them. vLLM adds an adapter's rows where they stand in the checkpoint, and so to the wrong features.

    Of its Transformers backend (0.32), embeddings with a scale inside (VaultGemma) are scaled without the adapter.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.
        places: names of modules and of parts of fused ones.

    Touches:
        vllm.model_executor.models.llama4: Llama4ForCausalLM.permute_qk_weight_for_rotary(self, name, loaded_weight)
        vllm.lora.model_manager: LoRAModelManager{model, modules}
    Why: vLLM takes an adapter of such modules, and adds the result to other features, or unscaled: we refuse by name.
    Until: vLLM does with an adapter's rows what it does with the weight's.
    """
    holders = [
        name
        for name, module in manager.model.named_modules()
        if hasattr(module, "permute_qk_weight_for_rotary") or _folds(module)
    ]
    turned = {
        place
        for place in places
        if place.endswith(("q_proj", "k_proj")) and any(not name or place.startswith(f"{name}.") for name in holders)
    }
    layers = {name: getattr(module, "base_layer", None) for name, module in manager.modules.items()}
    return frozenset(turned | {name for name, layer in layers.items() if hasattr(layer, "embed_scale")})


def _folds(module: Any) -> bool:
    """Whether an attention layer rotates a part of each head, and has its rows put so that the part comes first."""
    whole = getattr(module, "head_dim", None)
    return bool(getattr(module, "fold_rope_weights", False)) and getattr(module, "rope_head_dim", whole) != whole
