"""The poller for new versions of served adapters."""

from __future__ import annotations

import asyncio
import random
from typing import NoReturn

from lora_plugins.server.background import FewAtOnce, in_steps
from lora_plugins.server.lifecycle import Lifecycle
from lora_plugins.server.registry import source_of

_JITTER = 0.2
_POLLED_AT_ONCE = 4  # of one source: a source that does not answer holds back only its own names


async def poll(lifecycle: Lifecycle, interval_s: float) -> NoReturn:
    """Ask the sources for new versions every `interval_s`, plus or minus 20 %, so that replicas do not ask together."""
    registry = lifecycle.registry

    def source(name: str) -> str:
        return source_of(registry.get(name))

    polls = FewAtOnce(lifecycle.poll, source, limit=_POLLED_AT_ONCE, is_wanted=lambda name, _: bool(source(name)))
    try:
        while True:
            await asyncio.sleep(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - no secret
            async for adapter in in_steps(registry.all()):
                polls.begin(adapter.name, adapter.name)
    finally:
        polls.end_all()
