"""The stream on which slots are written, so that no batch that computes reads a slot that is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SlotStream:
    """Writes slots on the device that has them: on CUDA in a side stream, elsewhere at once.

    Source: the rules of torch's CUDA streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def idle_event(self) -> Any:
        """After this, nothing that was launched until now reads a slot; None where launching is computing."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def write(self, idle_event: Any, write: Callable[[], None]) -> Any:
        """Write once the slot is idle, and wait for the end of it; returns the event of that."""
        if self._stream is None:
            write()
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(idle_event)
            write()
            event = torch.cuda.Event()
            event.record()
        event.synchronize()
        return event

    def wait_for(self, written_event: Any) -> None:
        """Have what is launched from here on see what was written."""
        if written_event is not None:
            torch.cuda.current_stream().wait_event(written_event)
