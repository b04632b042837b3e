"""A worker extension (`--worker-extension-cls testbed.worker_memory.WorkerMemory`) that loses a worker's memory.

vLLM's CPU worker ignores sleep. What a sleeping GPU loses is overwritten here instead, between sleep and wake-up. With
`--weight-transfer-config '{"backend": "file"}'` weights are updated from a checkpoint, by vLLM's own way for trainers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class WorkerMemory:
    """Methods of a worker, for `collective_rpc`."""

    model_runner: Any

    def spoil_slots(self) -> int:
        """Overwrite every slot of every layer with NaN; returns the number of tensors."""
        stacks = list(_stacks(self.model_runner))
        for stack in stacks:
            stack.fill_(float("nan"))
        return len(stacks)

    def spoil_weights(self) -> int:
        """Overwrite the base model's weights; returns the number of parameters."""
        parameters = list(self.model_runner.get_model().parameters())
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(float("nan"))
        return len(parameters)

    def make_buffer_between_stages(self) -> None:
        """What vLLM's warm-up makes for pipeline parallelism; its CPU worker skips that in eager mode."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def slots_digest(self) -> str:
        """What the slots hold."""
        digest = hashlib.sha256()
        for stack in _stacks(self.model_runner):
            digest.update(stack.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _stacks(model_runner: Any) -> Iterator[torch.Tensor]:
    for module in model_runner.lora_manager._adapter_manager.modules.values():
        yield from module.lora_a_stacked
        yield from module.lora_b_stacked


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is needed."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights are."""

    directory: str = ""


class FileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weights in checkpoint format, as vLLM's engines for trainers load them, from a file."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for file in Path(update_info.directory).glob("*.safetensors"):
            self.model.load_weights(iter(load_file(file).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("file", FileEngine)
