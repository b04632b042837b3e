"""verl's own code in the workers: its extension, its `TensorLoRARequest`, its loader and its transfer of tensors.

What is not verl's: nothing waits for a CUDA device, which CPUs lack. And its loader calls `get_unstacked_mapper`, which
vLLM 0.30 to 0.33 have under another name: verl 0.9.1 fails there by itself, without our plugins too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from vllm.lora.request import LoRARequest

from testbed.frameworks.engines import Async, Engine, Said
from testbed.frameworks.packages import FOLDER
from testbed.frameworks.tensors import read
from testbed.frameworks.versions import Files

_EXTENSION = "testbed.frameworks.of_verl.extension"


def __getattr__(name: str) -> Any:
    """vLLM's workers import verl's extension from here."""
    if name != "extension":
        raise AttributeError(name)
    from vllm.model_executor.models.utils import WeightsMapper

    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
    _import_from_folder()
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    return vLLMColocateWorkerExtension


def _import_from_folder() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.insert(1, str(FOLDER))  # `tests` and `scripts` of verl's come after ours
    import torch

    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.ipc_collect = lambda *_: None


class OfVerl(Async):
    """`AsyncLLM` as verl's server makes it."""

    def __init__(self, **settings: Any) -> None:
        os.environ["VERL_RAY_JOB_ID"] = f"lora-plugins-{os.getpid()}"  # part of a socket's name below /tmp
        super().__init__(**{**settings, "worker_extension_cls": _EXTENSION, "max_loras": 1})

    async def update(self, directory: str) -> None:
        """As its rollout's `update_weights`, where the base weights are there already."""
        _import_from_folder()
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        config, tensors = read(directory)
        arguments = {"peft_config": config, "base_sync_done": True, "use_shm": True}
        received = asyncio.create_task(self.call("collective_rpc", "update_weights_from_ipc", kwargs=arguments))
        handle = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
        sender = BucketedWeightSender(handle, bucket_size_mb=8, use_shm=True)
        await asyncio.to_thread(asyncio.run, sender.async_send_weights(iter(tensors.items())))
        await received
        await self.call("reset_prefix_cache")


async def updated_by_its_extension(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Requests as its server makes them: with an adapter only where `list_loras` has the id, and with a stub path."""
    assert isinstance(engine, OfVerl)
    _import_from_folder()
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH

    async def ask() -> Said:
        is_loaded = VLLM_LORA_INT_ID in await engine.call("list_loras")
        return await engine.ask(LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH) if is_loaded else None)

    yield "base", await ask()
    for version in ("v1", "v2"):
        await engine.update(files.of(version))
        yield version, await ask()
