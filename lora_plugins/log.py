"""The logger of this package."""

from __future__ import annotations

import logging

# A child of vLLM's own logger: vLLM's handlers, level and format apply whenever and however vLLM sets them.
logger = logging.getLogger("vllm.lora_plugins")
