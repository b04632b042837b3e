"""vLLM's worker LoRA manager with a host tier in bytes and staging off the engine loop.

Source: `LRUCacheWorkerLoRAManager` in vllm/lora/worker_manager.py, 0.32 and 0.33; what is not overridden stays vLLM's.
The vLLM symbols that are touched stand in the ledger in `lora_plugins.engine`.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.utils.gc_utils import freeze_gc_heap

from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, describing
from lora_plugins.events import Found
from lora_plugins.logs import logger
from lora_plugins.manager import loading
from lora_plugins.manager.counters import Seconds, counters
from lora_plugins.manager.host_memory import own_memory
from lora_plugins.manager.host_tier import HostEntry, HostTier, Stage
from lora_plugins.manager.materialise import Materialiser
from lora_plugins.manager.policies import make_policy
from lora_plugins.manager.report import failure, report, residency
from lora_plugins.manager.slots import Reservation, SlotModelManager
from lora_plugins.manager.staging import Stager
from lora_plugins.resolvers.resolver import sources_of_worker
from lora_plugins.settings import Settings
from lora_plugins.store.layout import is_digest


class StagedWorkerLoRAManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Holds adapters in a host tier, staged by a thread; the engine loop only flips slots or copies into them.

    `stage`, `stage_state` and `release` are called from the API server through `collective_rpc`; they never block.
    Where nobody calls them (offline use), `add_adapter` loads in the loop, as vLLM does.
    """

    _manager_cls = SlotModelManager
    _adapter_manager: SlotModelManager

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> Any:
        """As vLLM's, with the host tier and the staging thread beside it."""
        result = super().create_lora_manager(model, vllm_config)
        settings = Settings.from_env()
        # With pipeline parallelism a worker has only some of the model's modules.
        self._is_whole_model = vllm_config.parallel_config.pipeline_parallel_size == 1
        self._refuse_unmatched = settings.refuse_unmatched
        self._check_finite = settings.check_finite
        self.tier = HostTier(
            settings.host_max_bytes,
            self._adapter_manager.capacity,
            make_policy(settings.host_policy),
            self._forget,
        )
        self.loading = Seconds()
        self._stager = Stager("lora-plugins-staging")
        self._fetcher = Stager("lora-plugins-fetching")
        self._materialiser = Materialiser(vllm_config.model_config.model, sources_of_worker)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._touch_slots()
        if self.device.type == "cpu":
            _freeze_heap()
        return result

    def _touch_slots(self) -> None:
        """Have the system give the slots' pages now, not at each one's first use."""
        for module in self._adapter_manager.modules.values():
            for index in range(self._adapter_manager.lora_slots):
                module.reset_lora(index)

    # --- called from the API server, in the engine loop; nothing here waits or reads ---

    def stage(
        self, owner: str, request: LoRARequest, origin: dict[str, Any], busy: Sequence[int] | None
    ) -> dict[str, Any]:
        """Lease an adapter for `owner`, begin to bring it if need be, and return its state.

        It is brought into an idle slot too, of none of the adapters in `busy`, unless that is None. `origin` has
        `size_bytes`, of the adapter's files, and `uri`, where it was loaded by one. `found` says where it was, if
        there was room.
        """
        adapter_id, manager = request.lora_int_id, self._adapter_manager
        found = self._found(request)
        if busy is not None and manager.unpinned_slots < 1 and not manager.is_ready(adapter_id):
            return failure(
                NoFreeSlot(
                    f"{manager.lora_slots} slots, all of them pinned",
                    expected="one that is not",
                    remedy="unpin an adapter, or raise --max-loras",
                    adapter=request.lora_name,
                )
            )
        entry = self.tier.get(adapter_id)
        if entry is None or entry.path != request.lora_path or entry.stage is Stage.FAILED:
            try:
                size_bytes = self.tier.expected_bytes(request.lora_path, origin["size_bytes"])
                entry = self.tier.reserve(adapter_id, request.lora_path, size_bytes)
            except LoRAPluginsError as error:
                error.adapter = error.adapter or request.lora_name
                return failure(error)
            entry.name = request.lora_name
            self.tier.lease(adapter_id, owner)
            state = self.stage_state(adapter_id, busy)  # reserves the slot, so that one job does both
            self._stager.submit(partial(self._stage, request, entry, origin.get("uri")))
            return {**state, "found": found}
        self.tier.lease(adapter_id, owner)
        return {**self.stage_state(adapter_id, busy), "found": found}

    def _found(self, request: LoRARequest) -> str:
        entry = self.tier.get(request.lora_int_id)
        if entry is None or entry.path != request.lora_path or entry.stage is not Stage.STAGED:
            return Found.STORE.value
        return Found.SLOT.value if self._adapter_manager.is_ready(request.lora_int_id) else Found.HOST.value

    def stage_state(self, adapter_id: int, busy: Sequence[int] | None) -> dict[str, Any]:
        """How far an adapter is; as for `stage`, `busy` asks for a slot.

        The answer also says whom it `displaced`, which adapters are `pinned`, and how many `unpinned_slots` there are.
        `state` is `absent`, `failed` (with the error), `staging`, `placing` (a slot is being filled), `staged` (the
        loop will copy it into a slot, as none is idle or none was asked for) or `ready` (no copy is left to do).
        """
        came = self.tier.settle(adapter_id)
        entry = self.tier.get(adapter_id)
        if entry is None:
            return {"state": "absent"}
        if came and entry.fill is not None:
            self._stager.submit(entry.fill)  # its slot was reserved when it could not be filled yet
        manager = self._adapter_manager
        if entry.stage is Stage.FAILED and entry.error is not None:
            manager.cancel_place(adapter_id)
            return failure(entry.error)
        displaced = self._reserve_slot(entry, busy)
        if entry.stage is Stage.STAGING:
            state = "staging"
        elif manager.is_ready(adapter_id):
            state = "ready"
        else:
            state = "placing" if manager.is_placing(adapter_id) else "staged"
        slots = {"unpinned_slots": manager.unpinned_slots, "pinned": manager.pinned}
        return {"state": state, "displaced": displaced, **slots}

    def release(self, owner: str, adapter_id: int) -> None:
        """End the lease of `owner`."""
        self.tier.release(adapter_id, owner)

    def lora_metrics(self) -> dict[str, Any]:
        """Adapters, memory and performance of this worker (R24)."""
        return {
            **report(self.tier, self._adapter_manager, self.device),
            "counters": counters(self.tier, self._adapter_manager, self.loading),
        }

    def residency(self) -> dict[int, dict[str, Any]]:
        """What is here of each adapter: `size_bytes`, `leases`, and whether it is `staged`, in a `slot`, `pinned`."""
        return residency(self.tier, self._adapter_manager)

    def _reserve_slot(self, entry: HostEntry, busy: Sequence[int] | None) -> list[int]:
        """Reserve an idle slot and have the staging thread fill it; returns who lost it."""
        if busy is None:
            return []
        reserved = self._adapter_manager.reserve_slot(entry.adapter_id, frozenset(busy))
        if reserved is None:
            return []
        entry.fill = partial(self._fill, entry, reserved)
        if entry.stage is Stage.STAGED:
            self._stager.submit(entry.fill)
        return [] if reserved.displaced is None else [reserved.displaced]

    # --- in the staging thread ---

    def _stage(self, request: LoRARequest, entry: HostEntry, uri: str | None) -> None:
        path = request.lora_path
        if self._materialiser.is_here(path):
            self._parse(request, entry)
        elif os.path.isabs(path):
            self._fetcher.submit(partial(self._fetch, request, entry, uri))  # others need not wait for it
        else:
            self._fetcher.submit(partial(self._parse, request, entry))  # vLLM expands ~, and fetches from the Hub

    def _fetch(self, request: LoRARequest, entry: HostEntry, uri: str | None) -> None:
        try:
            path = self._materialiser.bring(request.lora_name, request.lora_path, uri)
        except BaseException as error:  # noqa: BLE001 - the adapter fails alone
            self.tier.failed(entry, loading.explained(error, request.lora_name))
            return
        here = copy.copy(request)
        here.lora_path = path
        self._stager.submit(partial(self._parse, here, entry))

    def _parse(self, request: LoRARequest, entry: HostEntry) -> None:
        try:
            if self.tier.get(entry.adapter_id) is entry:  # else nobody wants it any more
                started = time.perf_counter()
                model = self._load_adapter(request)
                self.tier.arrived(entry, model, loading.size_bytes(model), time.perf_counter() - started)
        except BaseException as error:  # noqa: BLE001 - whatever vLLM raises, the engine and everybody else go on
            self.tier.failed(entry, loading.explained(error, request.lora_name))
        finally:
            self._materialiser.done_with(request.lora_path)
        if entry.stage is Stage.STAGED and entry.fill is not None:
            entry.fill()

    def _fill(self, entry: HostEntry, reservation: Reservation) -> None:
        model = entry.model
        if model is None or self.tier.get(entry.adapter_id) is not entry:
            return
        try:
            self._adapter_manager.fill_slot(reservation, model, self._stream)
        except BaseException as error:  # noqa: BLE001 - the slot is given back by the loop, the adapter fails alone
            self.tier.failed(entry, loading.explained(error, entry.name))

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """Parse, match with the model, pack, and copy off the file: nothing is left that would be read later.

        Raises:
            LoRAPluginsError, or whatever vLLM raises.
        """
        started = time.perf_counter()
        with describing(adapter=lora_request.lora_name):
            model = super()._load_adapter(lora_request)
            if self.device.type == "cpu":
                own_memory(model)
            self._adapter_manager.pack(model)
            self._check_matched(model, lora_request.lora_name)
            if self._check_finite and not is_digest(Path(lora_request.lora_path).name):  # else it was looked at
                loading.check_finite(lora_request.lora_name, model)
        self.loading.observe(time.perf_counter() - started)
        return model

    def _check_matched(self, model: LoRAModel, adapter: str) -> None:
        manager = self._adapter_manager
        matched = {
            name: weights
            for name in manager.modules
            if (weights := manager._get_lora_layer_weights(model, name)) is not None  # noqa: SLF001 - as vLLM looks up
        }
        for name, weights in matched.items():
            loading.check_fits(adapter, name, manager.modules[name], weights)
        unmatched = loading.unmatched_modules(model, matched)
        if not unmatched or (matched and not self._is_whole_model):
            return
        error = loading.mismatch(adapter, unmatched, len(model.loras), list(manager.modules))
        if self._refuse_unmatched or not matched:
            raise error
        logger.warning("Served without what does not match: %s", error)

    # --- vLLM's manager API, in the engine loop ---

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Register and activate; from the host tier where it is staged, else loaded here and now, as vLLM does.

        Raises:
            LoRAPluginsError, or whatever vLLM raises over a broken adapter; nothing has changed then.
        """
        entry = self.tier.get(lora_request.lora_int_id)
        is_other = entry is None or entry.path != lora_request.lora_path
        if is_other or lora_request.load_inplace:
            self._load_here(lora_request)
        return self._activate(lora_request)

    def _activate(self, lora_request: LoRARequest) -> bool:
        """Put what the host tier has of this id into a slot; it is loaded first where it has nothing."""
        adapter_id = lora_request.lora_int_id
        self.tier.settle(adapter_id)
        entry = self.tier.get(adapter_id)
        if entry is not None and entry.stage is Stage.FAILED and entry.error is not None:
            raise entry.error
        if entry is None or entry.model is None:
            self._load_here(lora_request)
            entry = self.tier.get(adapter_id)
        if entry is None:
            raise RuntimeError(f"adapter {adapter_id} was dropped while it was added")
        self.tier.used(adapter_id)
        manager = self._adapter_manager
        registered = manager.get_adapter(adapter_id)
        if registered is not entry.model:
            if registered is not None:
                manager.remove_adapter(adapter_id)  # a dummy: with data parallelism they come at any time
            manager.add_adapter(entry.model)
        manager.activate_adapter(adapter_id)
        return True

    def _load_here(self, request: LoRARequest) -> None:
        try:
            model = self._load_adapter(request)  # first, so that a broken adapter costs nobody a place
        except Exception as error:
            raise loading.explained(error, request.lora_name) from error
        adapter_id, size_bytes = request.lora_int_id, loading.size_bytes(model)
        before = self.tier.get(adapter_id)
        leases = set() if before is None else before.leases
        entry = self.tier.reserve(adapter_id, request.lora_path, size_bytes)
        entry.leases, entry.name = leases, request.lora_name
        self.tier.arrived(entry, model, size_bytes, 0.0)

    def _apply_adapters(self, lora_requests: set[LoRARequest]) -> None:
        requests = [request for request in lora_requests if request]
        manager = self._adapter_manager
        ids = frozenset(request.lora_int_id for request in requests)
        if len(ids) > manager.lora_slots:
            raise RuntimeError(f"a batch with {len(ids)} adapters, but only {manager.lora_slots} slots")
        manager.needed = ids
        for request in requests:
            # Not `add_adapter`: a request that was loaded in place says so for ever, and would be read at every step.
            if not self._is_dummy(request.lora_int_id):
                self._activate(request)
            else:
                manager.activate_adapter(request.lora_int_id)

    def _is_dummy(self, adapter_id: int) -> bool:
        return self.tier.get(adapter_id) is None and adapter_id in self._adapter_manager.list_adapters()

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; one that running requests lease goes with the last of them."""
        if self.tier.get(adapter_id) is not None:
            return self.tier.remove(adapter_id)
        return bool(super().remove_adapter(adapter_id))

    def remove_all_adapters(self) -> None:
        """Forget all adapters, and empty all slots."""
        self.tier.clear()
        super().remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Keep an adapter in the host tier and in a slot, until it is removed."""
        entry = self.tier.get(adapter_id)
        manager = self._adapter_manager
        if entry is not None and entry.model is not None and adapter_id not in manager.list_adapters():
            manager.add_adapter(entry.model)
        result = bool(super().pin_adapter(adapter_id))
        if entry is not None:
            self.tier.pin(adapter_id)
        return result

    def unpin_adapter(self, adapter_id: int) -> bool:
        """Let a pinned adapter go when its turn comes; returns whether it was pinned."""
        self._adapter_manager.unpin(adapter_id)
        return self.tier.unpin(adapter_id)

    def list_adapters(self) -> set[int]:
        """Ids of the adapters that are here: staged, or registered without the host tier (vLLM's dummies)."""
        registered = {key for key in self._adapter_manager.list_adapters() if self.tier.get(key) is None}
        return self.tier.staged() | registered

    def _forget(self, adapter_id: int) -> None:
        """An entry leaves the host tier, and with it its slot."""
        self._adapter_manager.cancel_place(adapter_id)
        self._adapter_manager.remove_adapter(adapter_id)


@functools.cache  # once in a process
def _freeze_heap() -> None:
    """Keep the garbage collector from what is there by now: model, vLLM, torch.

    Its first full pass over them stops every thread, and so the engine, for most of a second, sometime after the start.
    vLLM's GPU worker does the same once it is warm (vllm/v1/worker/gpu_worker.py, 0.32); its CPU worker does not.
    """
    freeze_gc_heap()
