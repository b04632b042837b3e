"""vLLM's slots, with a way to fill an idle one beside the engine loop, so that the loop only flips who owns it.

Source: `LRUCacheLoRAModelManager` in vllm/lora/model_manager.py, 0.32 and 0.33; what is not overridden stays vLLM's.
The vLLM symbols that are touched stand in the ledger in `lora_plugins.engine`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from lora_plugins.manager.counters import Seconds

_PACKED = "_lora_plugins_packed"


@dataclass(eq=False, slots=True)
class Reservation:
    """An idle slot that is being filled for one adapter.

    Attributes:
        displaced: the adapter that lost it.
        idle_since: a CUDA event after which nobody reads it. filled: whether its copies have been issued.
        done: the CUDA event that they are done; both events are None on the CPU.
    """

    lora_id: int
    index: int
    displaced: int | None
    idle_since: Any = None
    filled: bool = False
    done: Any = None


class SlotModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """Slots that can be filled beside the loop: a reserved one belongs to nobody until it is flipped to its adapter.

    A reserved slot's place in `lora_index_to_id` holds a negative number, which is no adapter's id. All methods are
    called in the engine loop, but for `pack` and `fill_slot`, which the staging thread calls. Where nobody reserves
    anything, it behaves as vLLM's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.filling = threading.Lock()  # held while a reserved slot is written beside the loop
        self.needed: frozenset[int] = frozenset()  # what the batch that is being prepared uses
        self._reserved: dict[int, Reservation] = {}  # by adapter id
        self.copies_in_loop = 0
        self.copying_in_loop_s = 0.0
        self.flips = 0
        self.switching_s = 0.0
        self.slot_evictions = 0
        self.activating = Seconds()
        super().__init__(*args, **kwargs)

    # --- vLLM's manager API ---

    def activate_adapter(self, lora_id: int) -> bool:
        """Put an adapter into a slot: a flip where the slot has been filled, else vLLM's copies, here and now."""
        started = time.perf_counter()
        reservation = self._reserved.get(lora_id)
        if reservation is not None and reservation.filled:
            self._flip(reservation)
            self._switched(time.perf_counter() - started)
            return True
        self.cancel_place(lora_id)  # half filled: it is needed now
        if lora_id not in self._active_adapters and None not in self.lora_index_to_id:
            self._free_slot()
        try:
            copied = bool(super().activate_adapter(lora_id))
        except BaseException:
            self.deactivate_adapter(lora_id)  # else half an adapter would pass for one, up to vLLM 0.32
            raise
        if copied:
            self.copies_in_loop += 1
            self.copying_in_loop_s += time.perf_counter() - started
            self._switched(time.perf_counter() - started)
        return copied

    def unpin(self, lora_id: int) -> None:
        """Let a pinned adapter's slot go; vLLM unpins only what it removes."""
        for cache in (self._registered_adapters, self._active_adapters):
            cache.pinned_items.discard(lora_id)

    def _switched(self, duration_s: float) -> None:
        self.switching_s += duration_s
        self.activating.observe(duration_s)

    def remove_all_adapters(self) -> None:
        """Remove all adapters from the manager, reserved slots included."""
        for adapter_id in list(self._reserved):
            self.cancel_place(adapter_id)
        super().remove_all_adapters()

    def _add_adapter(self, lora: LoRAModel) -> None:
        if getattr(lora, _PACKED, False):
            self._registered_adapters[lora.id] = lora
        else:
            super()._add_adapter(lora)

    def _free_slot(self) -> None:
        """Empty the slot used longest ago of those that the coming batch does not need."""
        pinned = self._active_adapters.pinned_items
        for adapter_id in list(self._active_adapters.cache):
            if adapter_id not in self.needed and adapter_id not in pinned:
                self.deactivate_adapter(adapter_id)
                self.slot_evictions += 1
                return
        for adapter_id in list(self._reserved):  # nobody runs on it yet
            if adapter_id not in self.needed:
                self.cancel_place(adapter_id)
                return

    # --- slots that are filled beside the loop ---

    def pack(self, lora: LoRAModel) -> None:
        """Merge packed modules and fold the scaling in, as vLLM does at registration; needs no slot and no loop."""
        self._create_merged_loras_inplace(lora)
        setattr(lora, _PACKED, True)

    @functools.cached_property  # some hundred modules, which stay the same
    def can_place(self) -> bool:
        """Whether every module's slot can be filled beside the loop (classification heads keep more than a slot)."""
        return not any(hasattr(module, "set_module_to_save") for module in self.modules.values())

    @property
    def unpinned_slots(self) -> int:
        """Slots that can change their owner."""
        return int(self.lora_slots) - len(self.pinned)

    @property
    def pinned(self) -> list[int]:
        """The adapters whose slots cannot."""
        return sorted(self._active_adapters.pinned_items)

    def reserve_slot(self, lora_id: int, busy: Container[int]) -> Reservation | None:
        """A slot that nobody reads, for `lora_id`; None where all are used, or it has one.

        `busy` are the adapters with requests in the engine; theirs, and those of the batch that was prepared last,
        are left alone.
        """
        if lora_id in self._active_adapters or lora_id in self._reserved or not self.can_place:
            return None
        for reservation in list(self._reserved.values()):
            if reservation.filled and reservation.lora_id not in busy:
                self._flip(reservation)  # its request went to another engine; from here on it is idle as any other
        displaced = None
        index = next((index for index, holder in enumerate(self.lora_index_to_id) if holder is None), None)
        if index is None:
            pinned = self._active_adapters.pinned_items
            displaced = next(
                (
                    adapter_id
                    for adapter_id in list(self._active_adapters.cache)  # the one used longest ago first
                    if adapter_id not in busy and adapter_id not in self.needed and adapter_id not in pinned
                ),
                None,
            )
            if displaced is None:
                return None
            index = self.lora_index_to_id.index(displaced)
            self.deactivate_adapter(displaced)
            self.slot_evictions += 1
        self.lora_index_to_id[index] = -1 - index  # nobody's id, and not free
        reservation = self._reserved[lora_id] = Reservation(lora_id, index, displaced)
        if self.device.type == "cuda":
            reservation.idle_since = torch.cuda.Event()
            reservation.idle_since.record()
        return reservation

    def fill_slot(self, reservation: Reservation, lora: LoRAModel, stream: Any) -> None:
        """Copy an adapter into the slot reserved for it, unless it was given back. Called beside the loop.

        On CUDA `stream` is a side stream, which waits until the slot is idle before it writes.
        """
        with self.filling:  # whoever gives the slot back waits for the end of this
            if self._reserved.get(reservation.lora_id) is not reservation or reservation.filled:
                return
            if stream is None:
                self._copy(reservation.index, lora)
                self._prepare(reservation.index)
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(reservation.idle_since)
                    self._copy(reservation.index, lora)
                    reservation.done = torch.cuda.Event()
                    reservation.done.record()
            reservation.filled = True

    def _copy(self, index: int, lora: LoRAModel) -> None:
        for module_name, module in self.modules.items():
            weights = self._get_lora_layer_weights(lora, module_name)
            if weights:
                module.set_lora(index, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(index)

    def _prepare(self, index: int) -> None:
        """Let kernels that keep adapters in another form than the slot's make it here instead of in a step."""
        for module in self.modules.values():
            prepare = getattr(module, "_lora_plugins_prepare", None)
            if prepare is not None:
                prepare(index)

    def is_ready(self, lora_id: int) -> bool:
        """Whether activating it costs the loop no copy."""
        reservation = self._reserved.get(lora_id)
        return lora_id in self._active_adapters or (reservation is not None and reservation.filled)

    def is_placing(self, lora_id: int) -> bool:
        """Whether a slot is being filled for it."""
        return lora_id in self._reserved and not self._reserved[lora_id].filled

    def cancel_place(self, lora_id: int) -> None:
        """Give a reserved slot back, once nobody writes it any more; whoever gets it overwrites what is in it."""
        if lora_id not in self._reserved:
            return
        with self.filling:
            reservation = self._reserved.pop(lora_id)
        self._wait_for(reservation)
        self.lora_index_to_id[reservation.index] = None

    def _flip(self, reservation: Reservation) -> None:
        del self._reserved[reservation.lora_id]
        self._wait_for(reservation)
        self.lora_index_to_id[reservation.index] = reservation.lora_id
        self._active_adapters[reservation.lora_id] = None
        self.flips += 1

    @staticmethod
    def _wait_for(reservation: Reservation) -> None:
        if reservation.done is not None:
            torch.cuda.current_stream().wait_event(reservation.done)
