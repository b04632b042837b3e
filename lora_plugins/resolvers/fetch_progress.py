"""Events of a fetch for the log: its start, the progress of a slow fetch, and its end; and how many bytes have arrived.

`reported` runs on the event loop of an API server around each fetch; the bars of the command line use `arrived_bytes`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from lora_plugins.events import Events, FetchEnded, FetchGoesOn, FetchStarted

_SLOW_S = 5.0  # until the first event of progress
_AGAIN_S = 30.0  # between events of progress


@asynccontextmanager
async def reported(events: Events, started: FetchStarted) -> AsyncIterator[None]:
    """Inside, a fetch runs: an event reports the progress after 5 s, and every 30 s afterwards."""
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
    """Bytes on disk of each file on its way into `directory`; None once the directory is gone.

    The function counts blocks, not lengths: ranges arrive in any order in a file that has its full length from the
    start. Bytes in files of other names count for the largest missing file, because a library downloads to names of its
    own.
    """
    if not os.path.isdir(directory):
        return None
    on_disk: dict[str, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                key = name if folder == directory else ""
                # st_blocks is in units of 512 bytes, whatever the file system's block size.
                # Files in folders below are a library's own: counted together under the empty name.
                on_disk[key] = on_disk.get(key, 0) + os.stat(os.path.join(folder, name)).st_blocks * 512
    elsewhere = sum(on_disk.values()) - sum(on_disk.get(name, 0) for name, _ in files)
    arrived = {}
    # Largest first: unnamed bytes most probably belong to the largest missing file.
    for name, size_bytes in sorted(files, key=lambda file: -file[1]):
        arrived[name] = min(size_bytes, on_disk.get(name) or elsewhere)
        elsewhere -= 0 if on_disk.get(name) else arrived[name]
    return arrived
