"""vLLM's table of a worker's slots, kept by the scheduler's commands.

vLLM makes one `PlannedModelManager` in a worker, once the model is loaded. `worker/jobs.py` gives slots to adapters
(`own`, `reserve`), all in the engine loop. vLLM reads the table in each step, to find the slot of each row's adapter.

Source: `LRUCacheLoRAModelManager` in vllm/lora/model_manager.py, 0.30 to 0.33. Methods that are not overridden stay
vLLM's, and hold adapters that others than the scheduler add (warm-up, dummy batches, `collective_rpc("add_lora")`).
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.packing import packer_of
from lora_plugins.kernels.slot_ranks import at_once
from lora_plugins.worker.host_memory import UntouchedZeros
from lora_plugins.worker.prompt_rows import PromptRows
from lora_plugins.worker.slot_counts import slots_of
from lora_plugins.worker.trained_tokens import TrainedTokens
from lora_plugins.worker.vectors import why_no_vectors


class PlannedModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots belong to the adapters that the scheduler names; a slot in the middle of a write has a negative id.

    vLLM's `set_adapter_mapping` reads `lora_index_to_id` each time, so a batch uses its adapters' slots;
    `activate_adapter` takes the first free slot. `lora_slots` and `capacity` are ours: rows for the slots that are only
    pointed at weights, which `torch.zeros` does not touch.

    Touches:
        vllm.lora.model_manager: LRUCacheLoRAModelManager.activate_adapter(self, lora_id)
            create_lora_manager(model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, vllm_config,
                device, lora_manager_cls, **kwargs)
            LoRAModelManager{lora_index_to_id, modules, _registered_adapters, _active_adapters, lora_slots,
                _create_lora_modules(self), remove_adapter(self, adapter_id), remove_all_adapters(self),
                deactivate_adapter(self, adapter_id), set_adapter_mapping(self, mapping)}
            LoRAModelManager{punica_wrapper_mapping, capacity}
        vllm.utils.cache: LRUCache{touch, remove_oldest}
    Why: slots that the scheduler has assigned belong to no other adapter.

    Attributes:
        trained_tokens: tables of the slots' trained tokens.
        without_vectors: see `why_no_vectors`.
        prompt_rows: names the adapters of rows of prompts.
        slots: copied slots, `--max-loras`, then slots that only point at packed weights. Nobody writes to the rows of
            pointed slots.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of vLLM's class."""
        # By the signature, so that it does not matter which arguments vLLM names.
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        self.planned: set[int] = set()  # slots that the scheduler has assigned
        self.slots = slots_of(given["lora_config"], given["max_num_seqs"])
        super().__init__(*args, **kwargs)
        self.trained_tokens = TrainedTokens(self, given["vllm_config"])
        self.without_vectors = why_no_vectors(self)
        self.prompt_rows = PromptRows(self)

    @property
    def lora_slots(self) -> int:
        """The number of rows that vLLM makes in each layer."""
        return self.slots.total

    @property
    def capacity(self) -> int:
        """The most adapters that others than the scheduler can add; vLLM requires at least the number of slots."""
        return max(int(super().capacity), self.lora_slots)

    def _create_lora_modules(self) -> None:
        # `torch.zeros` would touch, and so allocate, the rows of pointed slots, which nobody writes.
        with UntouchedZeros() if self.slots.pointed else nullcontext():
            super()._create_lora_modules()

    def empty(self) -> None:
        """Empty all slots, so that the system allocates the pages of copied slots now, not at the first use."""
        self.trained_tokens.empty()
        with at_once():
            for module in self.modules.values():
                for index in range(self.slots.copied):
                    module.reset_lora(index)
                ranks = watched_ranks(module)
                for index in range(self.slots.copied, self.slots.total):
                    if ranks is not None:
                        ranks.written(index, (0,) * len(ranks.largest))

    def own(self, slot: int, key: int | None) -> None:
        """Give the slot to an adapter, or free the slot and let it point at no memory, from the next batch on."""
        self._deactivate_unplanned(slot)
        if key is not None:
            self.remove_adapter(key)  # others may have added the adapter too: an id has a single slot
        self.lora_index_to_id[slot] = key
        if key is None:
            self.planned.discard(slot)
            for packer in filter(None, map(packer_of, self.modules.values())):
                packer.place(slot, None)
        else:
            self.planned.add(slot)

    def reserve(self, slot: int) -> None:
        """Mark the slot as being written: the slot belongs to no adapter, and is not free."""
        self._deactivate_unplanned(slot)
        # Negative: never an engine id, and unlike None not free for vLLM's activate_adapter.
        self.lora_index_to_id[slot] = -1 - slot
        self.planned.add(slot)

    def _deactivate_unplanned(self, slot: int) -> None:
        holder = self.lora_index_to_id[slot]
        if slot not in self.planned and holder is not None:
            self.deactivate_adapter(holder)  # added by others; vLLM activates the adapter again where a batch needs it

    def activate_adapter(self, lora_id: int) -> bool:
        """Activate as vLLM does, among the copied slots that the scheduler has not given away.

        Raises:
            ValueError: no such slot is free.
        """
        copied = slice(self.slots.copied)
        # vLLM counts its own active adapters only; slots of the scheduler's are full without being active there.
        if lora_id not in self._active_adapters and None not in self.lora_index_to_id[copied]:
            self._active_adapters.remove_oldest()
            if None not in self.lora_index_to_id[copied]:
                raise ValueError("No free lora slots")
        is_new = bool(super().activate_adapter(lora_id))  # takes the first free slot
        self.trained_tokens.clear(self.lora_index_to_id.index(lora_id))
        return is_new

    def _validate_moe_lora_format(self, lora_model: Any) -> None:
        """Note whether the adapter's experts are stacked, and refuse the adapter as vLLM does.

        Touches:
            vllm.lora.model_manager: LoRAModelManager._validate_moe_lora_format(self, lora_model) # since 0.32
                LoRAModelManager{_get_lora_layer_weights(self, lora_model, module_name)}
            vllm.lora.lora_model: LoRAModel{is_3d_lora_weight}
            vllm.lora.lora_weights: LoRALayerWeights{lora_a}
        Why: vLLM has a request's caller say it; commands of the scheduler name a path alone.
        Until: vLLM sees it in the adapter's tensors.
        """
        experts = [name for name, module in self.modules.items() if hasattr(module, "w2_lora_a_stacked")]
        pairs = [f"{name}{pair}" for name in experts for pair in ("", ".base_layer")]
        weights = [self._get_lora_layer_weights(lora_model, name) for name in pairs]
        # Weights of single experts come under other names, and as a list once vLLM has merged them.
        if any(one is not None and torch.is_tensor(one.lora_a) for one in weights):
            lora_model.is_3d_lora_weight = True
        if hasattr(LRUCacheLoRAModelManager, "_validate_moe_lora_format"):
            super()._validate_moe_lora_format(lora_model)

    def touch(self, lora_id: int) -> None:
        """Note the use of an adapter that others have added."""
        self._registered_adapters.touch(lora_id)
        self._active_adapters.touch(lora_id)

    def remove_all_adapters(self) -> None:
        """Remove the adapters that others than the scheduler have added, such as vLLM's dummies."""
        # vLLM's method resets the whole table of slots (model_manager.py, 0.30 to 0.33), planned slots too.
        kept = {slot: self.lora_index_to_id[slot] for slot in self.planned}
        super().remove_all_adapters()
        for slot, holder in kept.items():
            self.lora_index_to_id[slot] = holder
