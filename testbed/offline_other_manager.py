"""`testbed.offline` after another package has put its own LoRA manager into vLLM's workers, as Unsloth does.

The environment's OTHER_MANAGER says which, and when: "copy before" (our plugins are loaded), "copy after", and so
"subclass", which load adapters in their own way, and "more", which plans them too.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from vllm.lora import worker_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager, create_lora_manager
from vllm.lora.peft_helper import PEFTHelper

from testbed import offline

LOADED: list[str] = []


class OtherWorkerLoRAManager:
    """No subclass of vLLM's but a copy of its interface, as Unsloth's is."""

    _manager_cls = LRUCacheLoRAModelManager

    def __init__(self, vllm_config: Any, device: Any, embedding_modules: Any) -> None:
        self.vllm_config, self.device, self.embedding_modules = vllm_config, device, embedding_modules
        self.lora_config, self._lora_model_cls = vllm_config.lora_config, LoRAModel
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.max_position_embeddings = vllm_config.model_config.hf_config.max_position_embeddings
        self._cached_dummy_lora = False

    def create_lora_manager(self, model: Any, vllm_config: Any = None) -> Any:
        self._adapter_manager = create_lora_manager(
            model,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=self.vocab_size,
            lora_config=self.lora_config,
            device=self.device,
            lora_manager_cls=self._manager_cls,
            vllm_config=vllm_config,
        )
        return self._adapter_manager.model

    def _load_adapter(self, lora_request: Any) -> Any:
        LOADED.append(lora_request.lora_path)
        manager = self._adapter_manager
        expected = {part for name in manager.supported_lora_modules for part in self._parts_of(manager, name)}
        helper = PEFTHelper.from_local_dir(lora_request.lora_path, self.max_position_embeddings)
        helper.validate_legal(self.lora_config)
        return self._lora_model_cls.from_local_checkpoint(
            lora_request.lora_path,
            expected,
            peft_helper=helper,
            lora_model_id=lora_request.lora_int_id,
            device="cpu",
            dtype=self.lora_config.lora_dtype,
            model_vocab_size=self.vocab_size,
        )

    @staticmethod
    def _parts_of(manager: Any, name: str) -> list[str]:
        return list(manager.packed_modules_mapping.get(name, [name]))

    def dummy_lora_cache(self) -> Any:
        return nullcontext()

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return int(self._adapter_manager.get_dummy_lora_warmup_rank(default_rank))

    def supports_tower_connector_lora(self) -> bool:
        return False

    def add_dummy_lora(self, lora_request: Any, rank: int) -> bool:
        dummy = self._adapter_manager.create_dummy_lora(lora_request.lora_int_id, rank, self.embedding_modules)
        return bool(self._adapter_manager.add_adapter(dummy))

    def set_active_adapters(self, requests: Any, mapping: Any) -> None:
        for request in requests:
            self.add_adapter(request)
        self._adapter_manager.set_adapter_mapping(mapping)

    def add_adapter(self, lora_request: Any) -> bool:
        if lora_request.lora_int_id not in self.list_adapters():
            self._adapter_manager.add_adapter(self._load_adapter(lora_request))
        return bool(self._adapter_manager.activate_adapter(lora_request.lora_int_id))

    def remove_adapter(self, adapter_id: int) -> bool:
        return bool(self._adapter_manager.remove_adapter(adapter_id))

    def remove_all_adapters(self) -> None:
        self._adapter_manager.remove_all_adapters()

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.list_adapters())


class LoadsOtherwise(worker_manager.LRUCacheWorkerLoRAManager):
    def _load_adapter(self, lora_request: Any) -> Any:
        LOADED.append(lora_request.lora_path)
        return super()._load_adapter(lora_request)


class PlansToo(LoadsOtherwise):
    def _apply_adapters(self, lora_requests: Any) -> None: ...


KINDS = {"copy": OtherWorkerLoRAManager, "subclass": LoadsOtherwise, "more": PlansToo}


def main() -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker import lora_model_runner_mixin

    kind, when = os.environ["OTHER_MANAGER"].split()
    if when == "after":
        load_general_plugins()
    worker_manager.LRUCacheWorkerLoRAManager = KINDS[kind]
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = KINDS[kind]
    offline.main()
    assert LOADED, "it was not asked to load"


if __name__ == "__main__":
    main()
