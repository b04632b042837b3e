"""Modules of a worker's model that take no adapter in this engine, and why.

Source: `LoRAModelManager._create_lora_modules` in vllm/lora/model_manager.py, 0.30 to 0.33, passes over such modules
with a log line at most. vLLM then leaves out the adapters' weights for the modules, without a word.

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

from __future__ import annotations

from typing import Any

from lora_plugins.adapter.model_modules import Unadapted


def unadapted(manager: Any) -> dict[str, Unadapted]:
    """Return the reason by module name: of the modules themselves, and of the parts of fused modules.

    Args:
        manager: vLLM's `LoRAModelManager`, or a subclass.
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
    if not manager._match_target_modules(name):  # noqa: SLF001 - without named targets every module matches
        return Unadapted.TARGET
    return Unadapted.KIND
