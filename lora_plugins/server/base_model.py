"""Read names and largest rank of the served base model from vLLM's objects; only the engine knows the modules."""

from __future__ import annotations

from typing import Any

from lora_plugins.adapter.fit import BaseModel, original_name_of
from lora_plugins.settings import Settings


def describe_base(models: Any, settings: Settings) -> BaseModel:
    """Read the served base model from vLLM's `OpenAIServingModels`."""
    client = models.engine_client
    lora_config = getattr(getattr(client, "vllm_config", None), "lora_config", None)
    return BaseModel(
        path=models.model_config.model,
        served_names=tuple(path.name for path in models.base_model_paths),
        aliases=settings.base_aliases,
        max_rank=None if lora_config is None else lora_config.max_lora_rank,
        lora_enabled=lora_config is not None,
        original_name=original_name_of(models.model_config.model),
    )
