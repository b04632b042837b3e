"""The logger of this package."""

from __future__ import annotations

import logging

# Below vLLM's own logger, so that its handlers, level and format apply whenever and however vLLM sets them.
logger = logging.getLogger("vllm.lora_plugins")
