"""The poller for new versions of what is served."""

from __future__ import annotations

import asyncio
import random
from typing import NoReturn

from lora_plugins.log import logger
from lora_plugins.server.lifecycle import Lifecycle

_JITTER = 0.2
_POLLED_AT_ONCE = 4


async def poll(lifecycle: Lifecycle, interval_s: float) -> NoReturn:
    """Ask the sources for new versions every `interval_s`, give or take a fifth: replicas shall not ask at once."""
    places = asyncio.Semaphore(_POLLED_AT_ONCE)

    async def one(name: str) -> None:
        async with places:
            try:
                await lifecycle.poll(name)
            except Exception:  # noqa: BLE001 - the poller goes on
                logger.exception("Looking for a new version of adapter '%s' failed", name)

    while True:
        await asyncio.sleep(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - no secret
        await asyncio.gather(*(one(adapter.name) for adapter in lifecycle.registry.all() if adapter.version))
