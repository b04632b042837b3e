"""vLLM's table of slots, kept by the scheduler's commands.

Source: `LRUCacheLoRAModelManager` in vllm/lora/model_manager.py, 0.30 to 0.33; what is not overridden stays vLLM's, and
holds what others than the scheduler add (warm-up, dummy batches, `collective_rpc("add_lora")`).
"""

from __future__ import annotations

from typing import Any

from vllm.lora.model_manager import LRUCacheLoRAModelManager

from lora_plugins.ledger import Patch


class PlannedModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots that belong to whom the scheduler says; one that is being written holds a negative id, of no adapter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.planned: set[int] = set()  # slots that the scheduler has assigned
        super().__init__(*args, **kwargs)

    def own(self, slot: int, engine_id: int | None) -> None:
        """From the next batch on, the slot is this adapter's, or free."""
        self._deactivate_unplanned(slot)
        if engine_id is not None:
            self.remove_adapter(engine_id)  # where others have added it too: an id has one slot
        self.lora_index_to_id[slot] = engine_id
        if engine_id is None:
            self.planned.discard(slot)
        else:
            self.planned.add(slot)

    def reserve(self, slot: int) -> None:
        """The slot is being written: it belongs to no adapter, and is not free."""
        self._deactivate_unplanned(slot)
        self.lora_index_to_id[slot] = -1 - slot
        self.planned.add(slot)

    def _deactivate_unplanned(self, slot: int) -> None:
        holder = self.lora_index_to_id[slot]
        if slot not in self.planned and holder is not None:
            self.deactivate_adapter(holder)  # added by others; it is activated again where it is needed

    def activate_adapter(self, lora_id: int) -> bool:
        """As vLLM's, among the slots that the scheduler has not given away."""
        if lora_id not in self._active_adapters and None not in self.lora_index_to_id:
            self._active_adapters.remove_oldest()
        return bool(super().activate_adapter(lora_id))

    def touch(self, lora_id: int) -> None:
        """What others have added is used."""
        self._registered_adapters.touch(lora_id)
        self._active_adapters.touch(lora_id)

    def remove_all_adapters(self) -> None:
        """Remove what others than the scheduler have added, such as vLLM's dummies."""
        kept = {slot: self.lora_index_to_id[slot] for slot in self.planned}
        super().remove_all_adapters()
        for slot, holder in kept.items():
            self.lora_index_to_id[slot] = holder


LEDGER = (
    Patch(
        """
        vllm.lora.model_manager:
            LRUCacheLoRAModelManager.activate_adapter(self, lora_id)
            LoRAModelManager{lora_index_to_id, modules, _registered_adapters, _active_adapters, lora_slots}
            LoRAModelManager{punica_wrapper_mapping, capacity}
            LoRAModelManager.remove_adapter(self, adapter_id)
            LoRAModelManager.remove_all_adapters(self)
            LoRAModelManager.deactivate_adapter(self, adapter_id)
            LoRAModelManager.set_adapter_mapping(self, mapping)
        vllm.utils.cache:
            LRUCache{touch, remove_oldest}
        """,
        what="subclassed: lora_index_to_id is written as the scheduler says. Relied on: set_adapter_mapping reads it "
        "each time, so a batch uses its adapters' slots",
        why="slots that the scheduler has assigned belong to no other adapter",
    ),
)
