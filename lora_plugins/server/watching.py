"""The look after the copies of what is served, every few seconds: other processes find damage too."""

from __future__ import annotations

import asyncio
import weakref

from lora_plugins.log import logger
from lora_plugins.server.copies import Copies

LOOK_S = 2.0


async def watch(copies: weakref.ref[Copies], interval_s: float = LOOK_S) -> None:
    """Look every `interval_s`, for as long as somebody else keeps `copies`."""
    while True:
        await asyncio.sleep(interval_s)
        there = copies()
        if there is None:
            return
        try:
            await there.look()
        except ReferenceError:
            return  # vLLM's server is gone
        except Exception:  # noqa: BLE001 - it goes on
            logger.exception("Looking after the copies in the store failed")
        del there
