"""What is said of a fetch while it goes on: that it has begun, how far a slow one is, and that it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lora_plugins.events import Events, FetchEnded, FetchGoesOn, FetchStarted

_SLOW_S = 5.0
_AGAIN_S = 30.0


@asynccontextmanager
async def reported(events: Events, started: FetchStarted) -> AsyncIterator[None]:
    """Inside, a fetch goes on: an event says how far a slow one is after 5 s, and every 30 s from then on."""
    events.emit(started)
    telling = asyncio.create_task(_tell(events, started))
    try:
        yield
    finally:
        telling.cancel()
        events.emit(FetchEnded(started.name, started.source))


async def _tell(events: Events, started: FetchStarted) -> None:
    began, size_bytes = time.monotonic(), sum(size_bytes for _, size_bytes in started.files)
    await asyncio.sleep(_SLOW_S)
    while True:
        arrived = await asyncio.to_thread(arrived_bytes, started.directory, started.files) or {}
        took_s = time.monotonic() - began
        events.emit(FetchGoesOn(started.name, started.source, took_s, sum(arrived.values()), size_bytes))
        await asyncio.sleep(_AGAIN_S)


def arrived_bytes(directory: str, files: Sequence[tuple[str, int]]) -> dict[str, int] | None:
    """Bytes on disk of each file that is on its way into `directory`; None once that is gone.

    Blocks are counted, not lengths: ranges arrive in any order in a file that has its full length from the start.
    What lies in no file of these names is what a library has of the largest that is not there yet.
    """
    if not os.path.isdir(directory):
        return None
    on_disk: dict[str, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                key = name if folder == directory else ""
                on_disk[key] = on_disk.get(key, 0) + os.stat(os.path.join(folder, name)).st_blocks * 512
    elsewhere = sum(on_disk.values()) - sum(on_disk.get(name, 0) for name, _ in files)
    arrived = {}
    for name, size_bytes in sorted(files, key=lambda file: -file[1]):
        arrived[name] = min(size_bytes, on_disk.get(name) or elsewhere)
        elsewhere -= 0 if on_disk.get(name) else arrived[name]
    return arrived
