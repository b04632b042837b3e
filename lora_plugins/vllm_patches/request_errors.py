"""Errors of refused requests, as vLLM's outputs carry them from the engine core to the API server."""

from __future__ import annotations

import json
from typing import Any

from lora_plugins.errors import LoRAPluginsError, error_of

_PREFIX = "lora-plugins:"  # of the stop reason


def stop_reason(error: LoRAPluginsError) -> str:
    """An error as vLLM's outputs can carry it."""
    return _PREFIX + json.dumps(error.plain())


def error_tensor(error: LoRAPluginsError) -> Any:
    """An error as the output of a pooling request can carry it: vLLM asks for a tensor, and drops the stop reason."""
    import torch

    return torch.frombuffer(bytearray(stop_reason(error).encode()), dtype=torch.uint8)


def error_in_tensor(pooled: Any) -> LoRAPluginsError | None:
    """The error that a pooled output carries; None where it is a result, which is none of bytes."""
    if str(getattr(pooled, "dtype", "")) != "torch.uint8":
        return None
    return error_in(bytes(pooled.tolist()).decode(errors="replace"))


def error_in(reason: object) -> LoRAPluginsError | None:
    """The error that a stop reason carries; None where it is another one."""
    if isinstance(reason, str) and reason.startswith(_PREFIX):
        return error_of(json.loads(reason.removeprefix(_PREFIX)))
    return None
