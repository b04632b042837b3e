"""Put our worker LoRA manager in the place of vLLM's, and make it reachable from the API server."""

from __future__ import annotations

from typing import Any

from lora_plugins.manager.identity import tell_versions_apart
from lora_plugins.server.doors import put_gate

_installed = False


def install_manager() -> None:
    """Serve adapters from a host tier in every worker of this process, and put the gate before the engine client.

    Called in every process of vLLM; a second call changes nothing.
    """
    global _installed
    if _installed:
        return
    from vllm.v1.worker import lora_model_runner_mixin
    from vllm.v1.worker.worker_base import WorkerBase

    from lora_plugins.manager.slot_copy import put_exact_slots
    from lora_plugins.manager.weights_file import put_weights_file
    from lora_plugins.manager.worker_manager import StagedWorkerLoRAManager

    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = StagedWorkerLoRAManager
    WorkerBase.lora_plugins_stage = _stage
    WorkerBase.lora_plugins_stage_state = _stage_state
    WorkerBase.lora_plugins_release = _release
    WorkerBase.lora_plugins_remove = _remove
    WorkerBase.lora_plugins_pin = _pin
    WorkerBase.lora_plugins_unpin = _unpin
    WorkerBase.lora_plugins_residency = _residency
    WorkerBase.get_lora_metrics = _metrics
    put_exact_slots()
    put_weights_file()
    tell_versions_apart()
    put_gate()
    _installed = True


def is_installed() -> bool:
    """Whether the workers are ours, and a gate is before them."""
    return _installed


# `self` is a worker; each of these is reached by `AsyncLLM.collective_rpc`, by its name.


def _stage(  # noqa: PLR0917 - an RPC passes them by position
    self: Any, owner: str, name: str, adapter_id: int, path: str, origin: dict[str, Any], busy: list[int] | None
) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    request = LoRARequest(
        lora_name=name, lora_int_id=adapter_id, lora_path=path, is_3d_lora_weight=origin["is_3d_lora_weight"]
    )
    state: dict[str, Any] = _manager_of(self).stage(owner, request, origin, busy)
    return state


def _stage_state(self: Any, adapter_id: int, busy: list[int] | None) -> dict[str, Any]:
    state: dict[str, Any] = _manager_of(self).stage_state(adapter_id, busy)
    return state


def _release(self: Any, owner: str, adapter_id: int) -> None:
    _manager_of(self).release(owner, adapter_id)


def _remove(self: Any, owner: str, adapter_id: int) -> None:
    manager = _manager_of(self)
    manager.release(owner, adapter_id)
    manager.remove_adapter(adapter_id)


def _pin(self: Any, adapter_id: int) -> bool:
    return bool(_manager_of(self).pin_adapter(adapter_id))


def _unpin(self: Any, adapter_id: int) -> bool:
    return bool(_manager_of(self).unpin_adapter(adapter_id))


def _residency(self: Any) -> dict[int, dict[str, Any]]:
    residency: dict[int, dict[str, Any]] = _manager_of(self).residency()
    return residency


def _metrics(self: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = _manager_of(self).lora_metrics()
    return metrics


def _manager_of(worker: Any) -> Any:
    return worker.model_runner.lora_manager
