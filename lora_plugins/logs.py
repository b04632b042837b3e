"""The logging hook: one line per event, and a rejection's warning once."""

from __future__ import annotations

import logging
from collections import OrderedDict

from lora_plugins.events import (
    AdapterFetched,
    AdapterRejected,
    AdapterResolved,
    AdapterSwapped,
    AdapterUnknown,
    AdapterUnloaded,
    Event,
    SourceFailed,
    UpdateFailed,
)

_REMEMBERED = 1024

# Below vLLM's own logger, so that its handlers, level and format apply whenever and however vLLM sets them.
logger = logging.getLogger("vllm.lora_plugins")


class LogEvents:
    """Writes events to the `vllm.lora_plugins` logger.

    A broken adapter that is asked for again and again is worth one warning, not a flood: a repeat of the same name
    and text is logged at DEBUG. The last 1024 warnings are remembered.
    """

    def __init__(self) -> None:
        self._warned: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __call__(self, event: Event) -> None:
        match event:
            case AdapterFetched():
                logger.info(
                    "Adapter '%s' fetched from %s: %.1f MB in %.2f s (%.0f MB/s)",
                    event.name,
                    event.uri,
                    event.size_bytes / 1e6,
                    event.fetch_s,
                    event.size_bytes / 1e6 / max(event.fetch_s, 1e-6),
                )
            case AdapterResolved():
                logger.info(
                    "Adapter '%s' from %s: rank %d, %.1f MB, located in %.1f ms, %s in %.1f ms, checked in %.1f ms, %s",
                    event.name,
                    event.source,
                    event.rank,
                    event.size_bytes / 1e6,
                    event.locate_s * 1e3,
                    "fetched" if event.fetched else "found in the store",
                    event.obtain_s * 1e3,
                    event.check_s * 1e3,
                    event.path,
                )
                for note in event.notes:
                    self._warn(event.name, f"Adapter '{event.name}': {note}")
            case AdapterRejected():
                self._warn(event.name, f"Adapter refused ({event.source}): {event.error}")
            case SourceFailed():
                self._warn(event.name, f"Source did not answer ({event.source}): {event.error}")
            case AdapterSwapped():
                logger.info(
                    "Adapter '%s' swapped from %.12s to %.12s, staged in %.2f s",
                    event.name,
                    event.before,
                    event.after,
                    event.stage_s,
                )
            case UpdateFailed():
                self._warn(event.name, f"Adapter '{event.name}' goes on with its old version: {event.error}")
            case AdapterUnloaded():
                logger.info(
                    "Adapter '%s' unloaded after %.2f s; %d requests were ended",
                    event.name,
                    event.drain_s,
                    event.aborted,
                )
            case AdapterUnknown():
                logger.debug("No such adapter: %r %s", event.name, event.reason)

    def _warn(self, name: str, text: str) -> None:
        key = (name, text)
        if key in self._warned:
            self._warned.move_to_end(key)
            logger.debug("%s", text)
            return
        self._warned[key] = None
        if len(self._warned) > _REMEMBERED:
            self._warned.popitem(last=False)
        logger.warning("%s", text)
