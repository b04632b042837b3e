"""The logging hook: a line for an adapter's whole way into the engine, and a rejection's warning once.

Runs in the API server, in the code that emits an event. In: events of `events.py`. Out: lines of the logger
`vllm.lora_plugins`. Clients choose unknown names, and the number of requests, so `UnknownNames` bounds the lines for
unknown names.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable
from typing import Any

from cachetools import Cache, LRUCache, TTLCache

from lora_plugins import events
from lora_plugins.events import AdapterUnknown
from lora_plugins.log import logger
from lora_plugins.resolvers.breaker import BreakerOpen

_REMEMBERED = 1024
_BUSY_EVERY_S = 60.0
_NOT_SERVED = {
    "request": "Adapter not loaded",
    "load": "Adapter not loaded",
    "update": "Adapter '{}' goes on with its old version",
    "declared": "Declared adapter '{}' is not served as declared",
}


class LogEvents:
    """Writes events to the `vllm.lora_plugins` logger.

    A broken adapter that is requested again and again is worth a single warning, not a flood: a repeat of the same name
    and text is logged at DEBUG. The last 1024 warnings are remembered.

    Attributes:
        waits_for_load: whether an event follows when the engine has loaded an adapter, so that the adapter's line can
            wait; otherwise the line is written once the adapter is resolved.
    """

    def __init__(self) -> None:
        self.waits_for_load = False
        self._warned: LRUCache[tuple[str, str], None] = LRUCache(_REMEMBERED)
        self._resolved: LRUCache[str, tuple[str, str]] = LRUCache(_REMEMBERED)  # by name: path, line's beginning
        self._loaded: LRUCache[tuple[str, str], None] = LRUCache(_REMEMBERED)
        self._unknown = UnknownNames()
        self._said_busy: TTLCache[str, None] = TTLCache(_REMEMBERED, _BUSY_EVERY_S, time.monotonic)  # by source

    def __call__(self, event: events.Event) -> None:  # noqa: C901, PLR0912, PLR0915 - a case for each event
        match event:
            case events.FetchGoesOn():
                text = "Adapter '%s' is still being fetched from %s after %.0f s: %.1f of %.1f MB are here"
                done_mb, all_mb = event.arrived_bytes / 1e6, event.size_bytes / 1e6
                logger.info(text, event.name, event.source, event.took_s, done_mb, all_mb)
            case events.AdapterResolved():
                self._log_resolved(event)
            case events.AdapterLoaded():
                self._log_loaded(event)
            case events.NotServed():
                self._log_not_loaded(event.name)
                self._warn(event.name, f"{_NOT_SERVED[event.stage].format(event.name)}: {event.error}")
            case events.KeyRefused():
                self._warn(event.label, f"A key has reached its limit: {event.error}")
            case events.AdapterRejected():
                self._warn(event.name, f"Adapter refused ({event.source}): {event.error}")
            case events.SourceFailed(error=BreakerOpen()):
                logger.debug("%s", event.error)  # the opening of the breaker has its line
            case events.SourceFailed():
                self._warn(event.name, f"Source did not answer ({event.source}): {event.error}")
            case events.AdapterDenied():
                self._warn(event.name, f"Adapter denied ({event.source}): {event.error}")
            case events.BreakerOpened():
                text = "%s does not answer: its names are refused at once, until it answers. %s"
                logger.warning(text, event.source, event.error)
            case events.BreakerClosed():
                logger.warning("%s answers again, after %.1f s", event.source, event.open_s)
            case events.LookUpRefused():
                # Once a minute for each source: a flood of names has as many refusals.
                busy = f"More unknown names are asked for than {event.source} is asked about"
                _warn_once(self._said_busy, event.source, f"{busy}; the first of this minute: {event.error}")
            case events.AdapterUnknown():
                if (line := self._unknown.line(event)) is not None:
                    logger.info("%s", line)
            case events.AdapterSwapped() if event.before == event.after:
                text = "Adapter '%s' repaired: %s fetched and loaded again, in %.2f s"
                logger.info(text, event.name, _short(event.after), event.load_s)
            case events.AdapterSwapped():
                versions = _short(event.before), _short(event.after)
                logger.info("Adapter '%s' swapped from %s to %s, loaded in %.2f s", event.name, *versions, event.load_s)
            case events.DeclaredSetReconciled():
                logger.info("%d of %d declared adapters are served", event.served, event.declared)
            case events.DeclaredFileInvalid():
                logger.error("What was declared before goes on: %s", event.error)
            case events.StoreDamaged():
                text = "The store's copy %s is damaged: its bytes are not those of its digest; it is served no more"
                logger.error(text, event.digest)
            case events.AdapterUnloaded():
                text = "Adapter '%s' unloaded after %.2f s; %d requests were ended"
                logger.info(text, event.name, event.drain_s, event.aborted)
            case _:
                pass  # counted, not logged

    def _log_resolved(self, event: events.AdapterResolved) -> None:
        line = (
            f"Adapter '{event.name}' from {event.source}{f' ({event.uri})' if event.uri else ''}: rank {event.rank}, "
            f"{event.size_bytes / 1e6:.1f} MB, located in {event.locate_s * 1e3:.1f} ms, "
            f"{'fetched' if event.fetched else 'found in the store'} in {event.obtain_s * 1e3:.1f} ms, "
            f"checked in {event.check_s * 1e3:.1f} ms"
        )
        if self.waits_for_load:
            logger.debug("%s, %s", line, event.path)
            self._resolved[event.name] = event.path, line
        else:
            logger.info("%s, %s", line, event.path)
        for warning in event.warnings:  # once for each version
            self._warn(event.name, f"Adapter '{event.name}' ({os.path.basename(event.path)[:12]}): {warning}")
        for note in event.notes:
            self._warn(event.name, f"Adapter '{event.name}': {note}")

    def _log_loaded(self, event: events.AdapterLoaded) -> None:
        key = (event.name, event.path)
        # Versions differ by path: a swap resolves the next version while the first is still loading.
        path = self._resolved.get(event.name, ("", ""))[0]
        line = self._resolved.pop(event.name)[1] if path == event.path else ""
        is_new = bool(line) or key not in self._loaded
        self._loaded[key] = None
        level = logging.INFO if is_new else logging.DEBUG
        line = line or f"Adapter {event.name!r}{'' if is_new else ' again'}: {event.size_bytes / 1e6:.1f} MB"
        logger.log(level, "%s, loaded in %.1f ms, %s", line, event.load_s * 1e3, event.path)

    def _log_not_loaded(self, name: str) -> None:
        if name in self._resolved:
            path, line = self._resolved.pop(name)
            logger.info("%s, not loaded, %s", line, path)

    def _warn(self, name: str, text: str) -> None:
        # By text too: a new reason for the same name is a new warning.
        _warn_once(self._warned, (name, text), text)


def _warn_once(said: Cache[Any, None], key: Hashable, text: str) -> None:
    """Log a warning; at DEBUG while `said` remembers the key."""
    is_repeat = key in said
    said.setdefault(key)  # for a known key, a TTL cache keeps the end of its time, and an LRU cache renews its use
    logger.log(logging.DEBUG if is_repeat else logging.WARNING, "%s", text)


def _short(version: str) -> str:
    """Return a digest's beginning, or a path unchanged."""
    return version if os.sep in version else version[:12]


_SAME_NAME_EVERY_S = 60.0
_LINES_PER_MINUTE = 20
_SHOWN_CHARACTERS = 120
_SHOWN_PLACE_CHARACTERS = 500


class UnknownNames:
    """A line for each name once a minute, and at most 20 lines a minute for all names together.

    Requests without a line are counted, and the next line has the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: TTLCache[str, bool] = TTLCache(_REMEMBERED, _SAME_NAME_EVERY_S, timer=clock)
        self._minute_began = float("-inf")
        self._lines = 0
        self._left_out = 0

    def line(self, event: AdapterUnknown) -> str | None:
        """Return the line to log, or None."""
        now = self._clock()
        # A fixed window: the bound needs no list of times.
        if now - self._minute_began >= 60:
            self._minute_began, self._lines = now, 0
        name = _shortened(event.name, _SHOWN_CHARACTERS)
        if name in self._said or self._lines >= _LINES_PER_MINUTE:
            self._left_out += 1
            return None
        self._said[name] = True
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more requests for unknown names since the last such line)" if left_out else ""
        return f"No adapter '{name}': {_reasons(event)}{more}"


def _reasons(event: AdapterUnknown) -> str:
    if event.reason:
        return f"{_shortened(event.reason, _SHOWN_PLACE_CHARACTERS)}; no source was asked"
    if not event.absences:
        return "there is no source to ask"
    asked = (f"{absence.source}: {_shortened(str(absence), _SHOWN_PLACE_CHARACTERS)}" for absence in event.absences)
    return "; ".join(asked)


def _shortened(text: str, characters: int) -> str:
    """Return the text with a limited length, and with every character escaped that could forge a line."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:characters])
    return shown if len(text) <= characters else f"{shown}… ({len(text)} characters)"
