"""The stream that writes slots, so that no batch reads a slot in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SlotStream:
    """Writes slots on their device: on CUDA in a side stream, elsewhere at once.

    Source: the rules of torch's CUDA streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def idle_event(self) -> Any:
        """Return an event after all work launched so far; None where launching means computing."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def write(self, idle_event: Any, write: Callable[[], None]) -> Any:
        """Write once the slot is idle, and wait for the end of the copies; return the event of the end."""
        if self._stream is None:
            write()
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(idle_event)
            write()
            event = torch.cuda.Event()
            event.record()
        # The copies read page-locked host memory asynchronously: the thread waits, so nobody frees the adapter too
        # early.
        event.synchronize()
        return event

    def wait_for(self, written_event: Any) -> None:
        """Order all later launches of the current stream after the copies."""
        if written_event is not None:
            torch.cuda.current_stream().wait_event(written_event)
