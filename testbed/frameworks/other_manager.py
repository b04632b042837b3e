"""Unsloth's form: classes of its own for requests and for the worker's manager, put in the place of vLLM's.

The manager has vLLM's methods but is no subclass of vLLM's; it loads from a path or from tensors, and knows no
`load_inplace`. The request has no path, `load_inplace` or `is_3d_lora_weight`. Each version has a new id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from testbed.frameworks.engines import Engine, Offline, Said
from testbed.frameworks.tensors import model_of, read
from testbed.frameworks.versions import Files


class OtherRequest(msgspec.Struct, omit_defaults=True, array_like=True):  # type: ignore[call-arg]
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_tensors: dict[str, Any] | None = None
    lora_config: dict[str, Any] | None = None
    base_model_name: str | None = None

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OtherRequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def replace_classes() -> None:
    """In every place of this process that has vLLM's own by name."""
    from vllm.lora import request, worker_manager
    from vllm.v1.worker import lora_model_runner_mixin

    of_vllm = (worker_manager.WorkerLoRAManager, worker_manager.LRUCacheWorkerLoRAManager)
    methods = {name: value for kind in of_vllm for name, value in vars(kind).items() if name != "__dict__"}
    methods |= {"_load_adapter": _load_adapter, "add_adapter": _add_adapter}
    manager = type("OtherWorkerLoRAManager", (), methods)
    request.LoRARequest = worker_manager.LoRARequest = OtherRequest
    worker_manager.LRUCacheWorkerLoRAManager = manager
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = manager


def _load_adapter(self: Any, lora_request: Any) -> Any:
    config, tensors = lora_request.lora_config, lora_request.lora_tensors
    if tensors is None:
        config, tensors = read(lora_request.lora_path)
    return model_of(self, lora_request.lora_int_id, config, tensors)


def _add_adapter(self: Any, lora_request: Any) -> bool:
    manager, number = self._adapter_manager, lora_request.lora_int_id
    if number in self.list_adapters():
        is_there = manager.get_adapter(number) is not None
    else:
        model = self._load_adapter(lora_request)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        is_there = manager.add_adapter(model)
    manager.activate_adapter(number)
    return bool(is_there)


class SetFirst(Offline):
    """The classes are replaced before vLLM loads any plugin, as Unsloth does."""

    def __init__(self, **settings: Any) -> None:
        replace_classes()
        super().__init__(**settings)


class SetLast(Offline):
    """They are replaced after vLLM has loaded plugins."""

    def __init__(self, **settings: Any) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        replace_classes()
        super().__init__(**settings)


async def tensors_in_the_request(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    for number, version in enumerate(("v1", "v2"), 71):
        config, tensors = read(files.of(version))
        yield version, await engine.ask(OtherRequest(str(number), number, lora_tensors=tensors, lora_config=config))
