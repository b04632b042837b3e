"""Adapters given as tensors: a request that carries them, and vLLM's loader patched to take them from it.

verl, ms-swift, ROLL and NeMo-RL have a subclass of `LoRARequest` and a `_load_adapter` of this form.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file
from vllm.lora.request import LoRARequest

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.versions import Files

STUB_PATH = "a_path_that_is_not_there"


class TensorLoRARequest(LoRARequest):
    """Its path is a stub."""

    peft_config: dict[str, Any] | None = msgspec.field(default=None)
    lora_tensors: dict[str, Any] | None = msgspec.field(default=None)


def request_with_tensors(name: str, number: int, directory: str, **more: Any) -> TensorLoRARequest:
    config, tensors = read(directory)
    return TensorLoRARequest(name, number, STUB_PATH, peft_config=config, lora_tensors=tensors, **more)


def read(directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a trainer has in its memory."""
    config = json.loads((Path(directory) / "adapter_config.json").read_text())
    return config, load_file(Path(directory) / "adapter_model.safetensors")


def patch_loader() -> None:
    """Have vLLM's manager of this process build adapters from a request's tensors, where it has some."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    original = LRUCacheWorkerLoRAManager._load_adapter
    if getattr(original, "takes_tensors", False):
        return

    def _load_adapter(self: Any, lora_request: Any) -> Any:
        if isinstance(lora_request, TensorLoRARequest):
            return model_of(self, lora_request.lora_int_id, lora_request.peft_config, lora_request.lora_tensors)
        return original(self, lora_request)

    _load_adapter.takes_tensors = True  # type: ignore[attr-defined]
    LRUCacheWorkerLoRAManager._load_adapter = _load_adapter


def model_of(manager: Any, number: int, config: Any, tensors: Any) -> Any:
    """An adapter as a manager of vLLM's form holds it."""
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    return manager._lora_model_cls.from_lora_tensors(
        lora_model_id=number,
        tensors=tensors,
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )


async def swift_in_process(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """`add_lora` of tensors with `load_inplace` and one id for ever; requests name the id and a stub path."""
    patch_loader()
    for version in ("v1", "v2"):
        await engine.call("add_lora", request_with_tensors("trained", 111, files.of(version), load_inplace=True))
        await engine.call("reset_prefix_cache")
        is_loaded = 111 in await engine.call("list_loras")
        yield version, await engine.ask(LoRARequest("trained", 111, STUB_PATH) if is_loaded else None)


async def in_the_request(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Tensors in the request of a prompt, with a new id for each version."""
    patch_loader()
    for number, version in enumerate(("v1", "v2"), 21):
        yield version, await engine.ask(request_with_tensors(str(number), number, files.of(version)))
