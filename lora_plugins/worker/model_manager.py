"""vLLM's table of slots, kept by the scheduler's commands.

Source: `LRUCacheLoRAModelManager` in vllm/lora/model_manager.py, 0.30 to 0.33; what is not overridden stays vLLM's, and
holds what others than the scheduler add (warm-up, dummy batches, `collective_rpc("add_lora")`).
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.platforms import current_platform

from lora_plugins.kernels.dispatch import CPU_WRAPPER
from lora_plugins.kernels.layers import watched_ranks
from lora_plugins.kernels.packing import are_pointed
from lora_plugins.kernels.ranks import at_once
from lora_plugins.ledger import Patch
from lora_plugins.scheduler.messages import Slots
from lora_plugins.worker.untouched_zeros import UntouchedZeros


class PlannedModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots that belong to whom the scheduler says; one that is being written holds a negative id, of no adapter.

    Attributes:
        slots: copied ones, `--max-loras`, and after them those that are only pointed at packed weights. Nothing is
            written to the latter's rows, neither by the scheduler's commands nor by others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, whose signature this has."""
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        self.planned: set[int] = set()  # slots that the scheduler has assigned
        self.slots = slots_of(given["lora_config"], given["max_num_seqs"])
        super().__init__(*args, **kwargs)

    @property
    def lora_slots(self) -> int:
        """Rows that vLLM makes in each layer."""
        return self.slots.total

    @property
    def capacity(self) -> int:
        """The most adapters that others than the scheduler can add; vLLM wants as many as there are slots."""
        return max(int(super().capacity), self.lora_slots)

    def _create_lora_modules(self) -> None:
        with UntouchedZeros() if self.slots.pointed else nullcontext():
            super()._create_lora_modules()

    def empty(self) -> None:
        """Empty the slots, and have the system give those that are written their pages now, not at the first use."""
        with at_once():
            for module in self.modules.values():
                for index in range(self.slots.copied):
                    module.reset_lora(index)
                ranks = watched_ranks(module)
                for index in range(self.slots.copied, self.slots.total):
                    if ranks is not None:
                        ranks.written(index, (0,) * len(ranks.largest))

    def own(self, slot: int, key: int | None) -> None:
        """From the next batch on, the slot is this adapter's, or free."""
        self._deactivate_unplanned(slot)
        if key is not None:
            self.remove_adapter(key)  # where others have added it too: an id has one slot
        self.lora_index_to_id[slot] = key
        if key is None:
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
        """As vLLM's, among the copied slots that the scheduler has not given away.

        Raises:
            ValueError: there is none.
        """
        copied = slice(self.slots.copied)
        if lora_id not in self._active_adapters and None not in self.lora_index_to_id[copied]:
            self._active_adapters.remove_oldest()
            if None not in self.lora_index_to_id[copied]:
                raise ValueError("No free lora slots")
        return bool(super().activate_adapter(lora_id))  # takes the first that is free

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


def slots_of(lora_config: Any, max_num_seqs: int) -> Slots:
    """The slots of every worker with this configuration: one for each adapter in host memory where that costs nothing.

    Args:
        lora_config: vLLM's, with a dtype.
        max_num_seqs: the most requests, and so adapters, of one batch.
    """
    is_pointed = current_platform.get_punica_wrapper() == CPU_WRAPPER and are_pointed(
        lora_config.lora_dtype, fully_sharded=lora_config.fully_sharded_loras
    )
    return Slots(lora_config.max_loras, min(lora_config.max_cpu_loras, max_num_seqs) if is_pointed else 0)


LEDGER = (
    Patch(
        """
        vllm.lora.model_manager:
            LRUCacheLoRAModelManager.activate_adapter(self, lora_id)
            create_lora_manager(
                model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, vllm_config, device,
                lora_manager_cls, **kwargs)
            LoRAModelManager._create_lora_modules(self)
            LoRAModelManager{lora_index_to_id, modules, _registered_adapters, _active_adapters, lora_slots}
            LoRAModelManager{punica_wrapper_mapping, capacity}
            LoRAModelManager.remove_adapter(self, adapter_id)
            LoRAModelManager.remove_all_adapters(self)
            LoRAModelManager.deactivate_adapter(self, adapter_id)
            LoRAModelManager.set_adapter_mapping(self, mapping)
        vllm.utils.cache:
            LRUCache{touch, remove_oldest}
        vllm.config.lora:
            LoRAConfig{max_loras, max_cpu_loras, lora_dtype, fully_sharded_loras}
        vllm.platforms:
            current_platform
        vllm.platforms.interface:
            Platform.get_punica_wrapper(cls)
        """,
        what="subclassed: lora_index_to_id is written as the scheduler says. Relied on: set_adapter_mapping reads it "
        "each time, so a batch uses its adapters' slots; activate_adapter takes the first that is free. lora_slots and "
        "capacity are ours: rows for the slots that are only pointed at weights, which torch.zeros does not touch",
        why="slots that the scheduler has assigned belong to no other adapter",
    ),
)
