"""The look-out for new versions of what is served."""

from __future__ import annotations

import asyncio
import random
from typing import NoReturn

from lora_plugins.log import logger
from lora_plugins.server.lifecycle import Changes

_JITTER = 0.2
_AT_ONCE = 4


async def look_out(changes: Changes, interval_s: float) -> NoReturn:
    """Ask the sources for new versions every `interval_s`, give or take a fifth: replicas shall not ask at once."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        async with places:
            try:
                await changes.revalidate(name)
            except Exception:  # noqa: BLE001 - the look-out goes on
                logger.exception("Looking for a new version of adapter '%s' failed", name)

    while True:
        await asyncio.sleep(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - no secret
        await asyncio.gather(*(one(served.name) for served in changes.catalogue.all() if served.version is not None))
