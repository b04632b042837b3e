"""Write the served file (`served_file.py`) after each change of the served names, without holding up the event loop.

Runs in the leading API server: its event loop collects what is served, and a thread writes. A failed write is repeated.
Changes that come together are written together, and a long write is followed by a pause ten times as long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from lora_plugins.lifecycle.served_file import Fields, ServedFile
from lora_plugins.log import logger

_WRITE_DELAY_S = 0.5
_WRITE_AGAIN_S = 1.0  # after a failed write, for example on a full disk
_WRITE_PAUSE = 10  # times the processor's time of the last write, so that 100,000 names are not written all the time
_WRITTEN_S = 10.0  # only a disk that does not answer takes longer


class ServedWriter:
    """Writes what is served to a file after each change, one write at a time. For one event loop.

    Args:
        collect: returns what is served now.
    """

    def __init__(self, file: ServedFile, collect: Callable[[], Awaitable[list[Fields]]]) -> None:
        self._file, self._collect = file, collect
        self._is_written, self._is_unwritable = True, False
        self._writing: asyncio.Task[None] | None = None
        # A thread of its own: those of `to_thread` are few, and may all be fetching.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lora-plugins-served")
        self._waiting: list[asyncio.Future[None]] = []  # calls of `written`
        self._is_awaited = asyncio.Event()

    def write_soon(self) -> None:
        """Have what is served now written, at once or together with other changes of half a second."""
        self._is_written = False
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def written(self) -> None:
        """Wait until all changes so far are written, or have failed to be; a disk that hangs holds up no caller."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._is_awaited.set()
        self.write_soon()
        if not (await asyncio.wait([waiting], timeout=_WRITTEN_S))[0]:
            logger.warning("What is served is not written to %s within %.0f s", self._file.path, _WRITTEN_S)

    async def _write(self) -> None:
        """Write at once, then later changes together: one writer at a time, so that the last state wins.

        A failed write is repeated until the file holds what is served: no later change may come to ask for a write.
        """
        while not self._is_written:
            self._is_written, waiting, self._waiting = True, self._waiting, []
            self._is_awaited.clear()
            served = await self._collect()
            try:
                loop = asyncio.get_running_loop()
                least_s, busy_s = _WRITE_DELAY_S, await loop.run_in_executor(self._thread, self._write_file, served)
            except OSError as error:
                self._is_written, least_s, busy_s = False, _WRITE_AGAIN_S, 0.0
                self._note_unwritable(error)
            else:
                self._note_unwritable(None)
            for one in waiting:
                one.set_result(None)
            await asyncio.sleep(busy_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(least_s, _WRITE_PAUSE * busy_s) - busy_s):
                    await self._is_awaited.wait()

    def _write_file(self, served: Iterable[Fields]) -> float:
        """Write the served names, and return the seconds of a processor's time that the write took."""
        # Not the time on the clock: a thread that waits for the disk or for a processor takes nothing from others.
        started = time.thread_time()
        self._file.write(served)
        return time.thread_time() - started

    def _note_unwritable(self, error: OSError | None) -> None:
        """Log when writing begins to fail, and when the file is written again."""
        if error is not None and not self._is_unwritable:
            logger.warning("What is served cannot be written to %s: %s", self._file.path, error)
        elif error is None and self._is_unwritable:
            logger.info("What is served is written to %s again", self._file.path)
        self._is_unwritable = error is not None
