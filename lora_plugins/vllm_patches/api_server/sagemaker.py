"""SageMaker's `/invocations` answers for the model in the body.

vLLM has `model_hosting_container_standards` change the route's body: `model` becomes the name in the header
`X-Amzn-SageMaker-Adapter-Identifier`, and null without the header. So the base model answered whatever the body asked
for, names that nobody has and names that the key may not use too.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from lora_plugins.vllm_patches.wrapping import wrap

_PACKAGE = "model_hosting_container_standards.sagemaker.lora"
_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def keep_model_of_body() -> None:
    """Leave a body as it is where the header names no adapter; a second call, or no such package, changes nothing.

    vLLM's route is not touched; `InjectToBodyApiTransform.transform_request` of the other package is wrapped.

    Touches: vllm.entrypoints.serve.sagemaker.api_router: attach_router(app, supported_tasks, model_config)
    Why: the base model answered for every name.
    Until: inject_adapter_id leaves the body's model where there is no header.
    """
    transform = _transform()
    if transform is not None:
        wrap(transform, "transform_request", _transform_request)


async def _transform_request(original: Any, self: Any, raw_request: Any) -> Any:
    if raw_request.headers.get(_HEADER):
        return await original(self, raw_request)
    unchanged = importlib.import_module(f"{_PACKAGE}.models").BaseLoRATransformRequestOutput
    return unchanged(request=None, raw_request=raw_request)


def _transform() -> Any:
    """Return the class that puts the header's name into the body; importing it must not change the log."""
    # The levels that the import may change.
    loggers: list[logging.Logger | logging.Handler] = [logging.root]
    loggers += [*logging.root.handlers, *logging.getLogger("vllm").handlers]
    levels = [one.level for one in loggers]
    try:
        return importlib.import_module(f"{_PACKAGE}.transforms").InjectToBodyApiTransform
    except ImportError:
        return None
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
