"""The modules for LoRA of a model, read off vLLM's manager after vLLM has wrapped the model's layers.

A worker describes its model at start, to check adapters (`adapter_checks.py`). The process that describes the model to
the API server (`vllm_patches/engine_modules.py`) makes the layers without weights. In goes vLLM's `LoRAModelManager`,
out comes `ModelModules`: names, kinds and sizes, and why other modules take no adapter.

Source: `LoRAModelManager` in vllm/lora/model_manager.py, the layers in vllm/lora/layers, 0.30 to 0.33.

Touches:
    vllm.lora.model_manager: LoRAModelManager{model, modules, packed_modules, is_pooling_model, vocab_size}
        LoRAModelManager{_is_non_gated_moe, _enable_mixed_moe_lora_format, supports_mm, mm_mapping}
        LoRAModelManager._get_text_lora_names(self, module_name) # since 0.33
    vllm.config.lora: LoRAConfig{max_lora_cls_labels} # since 0.31
    vllm.lora.layers.fused_moe: FusedMoEWithLoRA{moe_config, global_num_experts, tp_size, enable_moe_shared_loras}
        FusedMoE3DWithLoRA
    vllm.model_executor.layers.fused_moe.config: FusedMoEConfig{hidden_dim, hidden_dim_unpadded}
        FusedMoEConfig{intermediate_size_per_partition, intermediate_size_per_partition_unpadded}
    vllm.model_executor.utils: get_moe_expert_mapping(model)
    vllm.model_executor.models.utils:
        WeightsMapper{orig_to_new_prefix, orig_to_new_substr, orig_to_new_suffix, orig_to_new_regex}
Why: an adapter fits if each of its tensors lands in a module of this model.
Until: vLLM says over its API which modules adapters can be for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lora_plugins.adapter.model_modules import ExpertFormat, Experts, ModelModules, ModuleKind, ModulePlace, Unadapted
from lora_plugins.worker.refused_modules import computed_otherwise, unadapted, uncalled


def describe(manager: Any) -> ModelModules:
    """Return the modules that adapters can be for.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.
    """
    from vllm import __version__

    model = manager.model
    # Modules that no forward pass calls, and below modules that compute otherwise than PEFT: both take no adapter.
    without_effect = uncalled(manager)
    places = {
        name: place
        for module in manager.modules
        if module not in without_effect
        for name, place in _places(manager, module)
    }
    otherwise = computed_otherwise(manager, places)
    # Only our manager has the attributes of trained tokens and vectors.
    tokens = getattr(manager, "trained_tokens", None)
    return ModelModules(
        architecture=type(model).__name__,
        vllm_version=__version__,
        places={name: place for name, place in places.items() if name not in otherwise},
        vocabulary=getattr(manager, "vocab_size", None),
        renames=_renames(model),
        skipped=tuple(getattr(model, "lora_skip_prefixes", None) or ()),
        without_model_prefix=bool(manager.is_pooling_model),
        experts={
            name: _experts(manager, name)
            for name, module in manager.modules.items()
            if _kind(module) is ModuleKind.EXPERTS
        },
        model_type=str(getattr(getattr(model, "config", None), "model_type", "")),
        text_prefix=_text_prefix(manager),
        unadapted={
            **unadapted(manager),
            **dict.fromkeys(without_effect, Unadapted.UNCALLED),
            **dict.fromkeys(otherwise, Unadapted.OTHERWISE),
        },
        copies=_copies(model, places),
        **({} if tokens is None else {"tokens": tokens.places, "without_tokens": tokens.why_not}),
        **({} if tokens is None else {"without_vectors": manager.without_vectors}),
    )


def _copies(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the places of `v_proj` by those of `k_proj`, in layers without values of their own.

    Gemma 4 with `attention_k_eq_v` (26B, 31B): a layer of full attention takes what `k_proj` gives for values too, and
    vLLM loads `k_proj` into both (`_gemma4_layer_weights_mapper` in vllm/model_executor/models/gemma4.py, 0.32),
    but an adapter's pair for `k_proj` into one.
    """
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    if not getattr(config, "attention_k_eq_v", False):
        return {}
    full = {str(layer) for layer, kind in enumerate(config.layer_types) if kind == "full_attention"}
    return {
        name: f"{name.removesuffix('k_proj')}v_proj"
        for name in names
        if name.endswith(".self_attn.k_proj") and name.split(".")[-3] in full
    }


def _text_prefix(manager: Any) -> str:
    """Return the prefix of a multimodal model's text model; since vLLM 0.33 a text model's adapter fits there."""
    if not hasattr(manager, "_get_text_lora_names") or not manager.supports_mm:
        return ""
    return str(manager.mm_mapping.language_model[0]).rstrip(".")


def _places(manager: Any, name: str) -> Iterator[tuple[str, ModulePlace]]:
    """Yield the names that adapters may have for a module or for its parts, each with its place.

    A size of None is unknown: vLLM alone checks it.
    """
    module = manager.modules[name]
    kind = _kind(module)
    if kind is ModuleKind.EXPERTS:
        yield from _places_of_experts(manager, name)
        return
    inputs, outputs = _sizes(module, kind)
    parts: Sequence[str] = manager.packed_modules.get(name, ())
    if not parts:
        total = None if None in outputs else sum(size for size in outputs if size is not None)
        matrices = _matrices(module.base_layer) if kind is ModuleKind.LINEAR else ()
        # With --max-lora-cls-labels, vLLM takes heads of other numbers of labels, and compares the numbers itself.
        is_open = kind is ModuleKind.CLASSIFIER and bool(getattr(manager.lora_config, "max_lora_cls_labels", None))
        is_max = kind is ModuleKind.HEAD or is_open
        # Matrices whose sizes do not add up to the outputs are not what the slot's B covers.
        matrices = matrices if sum(matrices) == total else ()
        yield name, ModulePlace(name, kind, inputs, total, is_max, matrices=matrices, factor=_factor(manager, name))
        return
    # Where vLLM's parts are no slices (`in_proj_qkvz` is two parts of four slices), only vLLM can tell the parts'
    # sizes.
    known = outputs if len(outputs) == len(parts) else [None] * len(parts)
    for part, size in zip(parts, known, strict=True):
        yield part, ModulePlace(name, kind, inputs, size)


def _factor(manager: Any, name: str) -> str:
    """Return the part of a gated MLP that is a factor of the inputs of its `down_proj`; empty for another module."""
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    parent, _, leaf = name.rpartition(".")
    parts = manager.packed_modules.get(f"{parent}.gate_up_proj", ())
    layers = dict(manager.model.get_submodule(parent).named_children())
    # Further layers, such as a norm, or another activation, such as one that clamps, may be in between.
    if leaf != "down_proj" or len(parts) != 2 or layers.keys() != {"gate_up_proj", "act_fn", "down_proj"}:
        return ""
    return str(parts[1]) if isinstance(layers["act_fn"], GeluAndMul | SiluAndMul) else ""


def _places_of_experts(manager: Any, name: str) -> Iterator[tuple[str, ModulePlace]]:
    """Yield places per expert where the engine wants so, and as PEFT stacks: `experts` and `experts.base_layer`."""
    experts = _experts(manager, name)
    hidden, inner = experts.hidden_size, experts.intermediate_size
    sizes = {"w1": (hidden, inner), "w2": (inner, hidden), "w3": (hidden, inner), "w13": (hidden, 2 * inner)}
    for part, role in zip(manager.packed_modules.get(name, ()), _roles(manager, name), strict=True):
        yield part, ModulePlace(name, ModuleKind.EXPERTS, *sizes[role], part=role)
    if ExpertFormat.STACKED in experts.formats:
        for place, role in ((name, "w2"), (f"{name}.base_layer", "w13")):
            yield place, ModulePlace(name, ModuleKind.EXPERTS, *sizes[role], part=role, stacked=experts.count)


def _experts(manager: Any, name: str) -> Experts:
    module = manager.modules[name]
    moe = module.moe_config
    parts = [part.rsplit(".", 1)[-1] for part in manager.packed_modules.get(name, ())]
    return Experts(
        count=int(module.global_num_experts),
        # A backend may have padded the sizes.
        hidden_size=int(moe.hidden_dim_unpadded or moe.hidden_dim),
        intermediate_size=module.tp_size
        * int(moe.intermediate_size_per_partition_unpadded or moe.intermediate_size_per_partition),
        formats=_formats(manager, module),
        names=dict(zip(_roles(manager, name), parts, strict=True)) or _names_of_experts(manager.model),
        is_interleaved=list(getattr(manager.model.config, "architectures", None) or ())[:1] == ["GptOssForCausalLM"],
    )


def _formats(manager: Any, module: Any) -> tuple[ExpertFormat, ...]:
    """Return the forms in which this layer of experts takes adapters' weights."""
    if getattr(module, "enable_moe_shared_loras", False):
        return (ExpertFormat.SHARED,)
    if type(module).__name__ == "FusedMoE3DWithLoRA":
        return (ExpertFormat.STACKED,)
    if getattr(manager, "_enable_mixed_moe_lora_format", False):
        return (ExpertFormat.PER_EXPERT, ExpertFormat.STACKED)
    return (ExpertFormat.PER_EXPERT,)


def _roles(manager: Any, name: str) -> list[str]:
    """Return each packed part's role, by position, as vLLM packs experts (`PackedLoRALayerWeights.pack_moe`)."""
    parts = manager.packed_modules.get(name, ())
    roles = ("w1", "w2", "w3") if len(parts) == 3 or not manager._is_non_gated_moe else ("w1", "w2")  # noqa: SLF001
    return [roles[i % len(roles)] for i in range(len(parts))]


def _names_of_experts(model: Any) -> dict[str, str]:
    """Return an adapter's names for the parts of an expert, where the engine packs none; empty where unknown."""
    from vllm.model_executor.utils import get_moe_expert_mapping

    try:
        mapping = get_moe_expert_mapping(model)
    except ValueError:
        return {}
    names = {role: name.rstrip(".").removesuffix(".base_layer") for _, name, _, role in mapping}
    return {role: name.rsplit(".", 1)[-1] for role, name in names.items()}


def _kind(module: Any) -> ModuleKind:
    # By attributes, not classes: subclasses, such as fully sharded layers, keep the attributes of their kind.
    if hasattr(module, "w2_lora_a_stacked"):
        return ModuleKind.EXPERTS
    if hasattr(module, "full_weight_stacked"):
        return ModuleKind.CLASSIFIER
    if hasattr(module, "lora_a_stacked_2d"):
        return ModuleKind.EMBEDDING
    return ModuleKind.LINEAR if isinstance(module.lora_a_stacked, tuple) else ModuleKind.HEAD


def _sizes(module: Any, kind: ModuleKind) -> tuple[int | None, list[int | None]]:
    """Return the inputs, and the outputs of each slice, of the whole layer; None where unknown."""
    stacks_a, stacks_b = module.lora_a_stacked, module.lora_b_stacked
    if kind in {ModuleKind.EMBEDDING, ModuleKind.HEAD}:
        return int(stacks_a.shape[1 if kind is ModuleKind.EMBEDDING else -1]), [int(stacks_b.shape[2])]
    slices = [int(stack.shape[2]) for stack in stacks_b]
    if getattr(module, "tp_size", 1) == 1:
        return int(stacks_a[0].shape[-1]), list(slices)
    return _whole_sizes(module.base_layer, slices)


def _whole_sizes(layer: Any, slices: Sequence[int]) -> tuple[int | None, list[int | None]]:
    """Return the sizes of a layer that is divided among workers, as `_sizes` does."""
    inputs = getattr(layer, "input_size", None)
    # QKVParallelLinear's `output_sizes` count key and value heads that are replicated among workers (vLLM's linear.py);
    # the total numbers of heads do not.
    if hasattr(layer, "total_num_kv_heads"):
        query = layer.total_num_heads * layer.head_size
        key = layer.total_num_kv_heads * layer.head_size
        value = layer.total_num_kv_heads * getattr(layer, "v_head_size", layer.head_size)
        return inputs, [query, key, value] if len(slices) == 3 else [query + key + value]
    outputs = list(getattr(layer, "output_sizes", ()))
    if len(outputs) == len(slices):
        return inputs, outputs
    return inputs, [getattr(layer, "output_size", None)] if len(slices) == 1 else [None] * len(slices)


def _matrices(layer: Any) -> tuple[int, ...]:
    """Return the outputs of each matrix that a fused layer joins; empty for a layer of a single matrix."""
    if hasattr(layer, "total_num_kv_heads"):
        _, outputs = _whole_sizes(layer, (0, 0, 0))
        return tuple(size for size in outputs if size is not None)
    sizes = tuple(int(size) for size in getattr(layer, "output_sizes", None) or ())
    return sizes if len(sizes) > 1 else ()


def _renames(model: Any) -> dict[str, Any]:
    """Return the model's mapping of checkpoint names, as `WorkerLoRAManager._load_adapter` uses it, in plain values."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
    return {
        "renaming": [
            [list(one.source_patterns), list(one.target_patterns)]
            for one in getattr(mapper, "orig_to_new_renaming", None) or ()
        ],
        "regex": [[pattern.pattern, pattern.flags, new] for pattern, new in mapper.orig_to_new_regex.items()],
        "substr": dict(mapper.orig_to_new_substr),
        "prefix": dict(mapper.orig_to_new_prefix),
        "suffix": dict(mapper.orig_to_new_suffix),
    }
