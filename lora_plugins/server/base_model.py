"""What the server serves, read off its own objects: names, largest rank, and the shapes of every layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.log import logger
from lora_plugins.settings import Settings


def describe_base(models: Any, settings: Settings) -> BaseModel:
    """Read the served base model off vLLM's `OpenAIServingModels`."""
    client = models.engine_client
    lora_config = getattr(getattr(client, "vllm_config", None), "lora_config", None)
    return BaseModel(
        path=models.model_config.model,
        served_names=tuple(path.name for path in models.base_model_paths),
        aliases=settings.base_aliases,
        max_rank=None if lora_config is None else lora_config.max_lora_rank,
        lora_enabled=lora_config is not None,
        module_shapes=module_shapes(models.model_config.hf_config),
    )


def module_shapes(hf_config: Any) -> Mapping[str, tuple[int, int]]:
    """Sizes `(in, out)` of every linear layer and embedding, by the module names that PEFT uses.

    Builds the Transformers model of this configuration on torch's meta device: no memory, no weights, exact for
    every architecture that Transformers has. Empty, with a line in the log, for one that it does not have.
    """
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    names = getattr(hf_config, "architectures", None) or ["an unnamed architecture"]
    model_class = getattr(transformers, names[0], None)
    if model_class is None:
        logger.warning("Shapes are not checked: Transformers has no %s", names[0])
        return {}
    try:
        with torch.device("meta"):
            model = model_class._from_config(copy.deepcopy(hf_config))  # noqa: SLF001 - what AutoModel.from_config calls
    except Exception as error:  # noqa: BLE001 - whatever a model's constructor raises, the server must start
        logger.warning("Shapes are not checked: %s cannot be built from its configuration (%s)", names[0], error)
        return {}
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            shapes[name] = (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, Conv1D):
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
        elif name.endswith(".experts"):
            shapes[name] = (0, 0)  # fused, in a layout that the engine knows
    return shapes
