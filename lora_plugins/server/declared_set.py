"""A declared set of adapters: what a file lists is served, from the server's start and whenever the file changes.

The file decides when it changes. Between two changes only what failed is tried again: what an administrator swaps,
unloads or rolls back meanwhile stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.events import DeclaredFileInvalid, DeclaredSetReconciled, Events, NotServed
from lora_plugins.log import logger
from lora_plugins.resolvers.uris import AllowedUris
from lora_plugins.server.declared_file import DeclaredAdapter, parse, read_bytes
from lora_plugins.server.lifecycle import Lifecycle

LOOK_INTERVAL_S = 2.0  # a mounted ConfigMap follows its change after a minute or so
RETRY_S = 15.0
_LOADED_AT_ONCE = 4


@dataclass(slots=True)
class DeclaredState:
    """One entry, and what became of it: served where `is_applied`, not yet tried, or failed with `error`."""

    entry: DeclaredAdapter
    is_applied: bool = False
    error: LoRAPluginsError | None = None


class DeclaredSet:
    """Serves what the file declares, and unloads what it declares no more.

    Args:
        path: of the file; a link that is exchanged, as Kubernetes does with a mounted ConfigMap, counts as a change.
        allowed: the URIs that may be fetched.

    Attributes:
        states: what is declared, by name, in the file's order.
        file_error: why the file's present content is not followed; None where it is.
    """

    def __init__(self, lifecycle: Lifecycle, path: Path, allowed: AllowedUris, events: Events) -> None:
        self.path = path
        self.states: dict[str, DeclaredState] = {}
        self.file_error: LoRAPluginsError | None = None
        self._lifecycle = lifecycle
        self._allowed = allowed
        self._events = events
        self._places = asyncio.Semaphore(_LOADED_AT_ONCE)
        self._unloading: set[asyncio.Task[None]] = set()
        self._content = b""
        self._told: DeclaredSetReconciled | None = None

    def __contains__(self, name: object) -> bool:
        """Whether this name is declared now."""
        return name in self.states

    async def start(self) -> None:
        """Read the file, and serve what is to be served before the server is ready; each is tried once.

        Raises:
            InvalidSettings: the file cannot be right.
        """
        self._content = await asyncio.to_thread(read_bytes, self.path)
        self.states = {name: DeclaredState(entry) for name, entry in self._parse(self._content).items()}
        await self._apply(state for state in self.states.values() if state.entry.preload)

    async def follow(self) -> NoReturn:
        """Serve the rest, then whatever the file says whenever it changes; what failed is tried again."""
        await self._apply(self.states.values())
        waited_s = 0.0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            waited_s += LOOK_INTERVAL_S
            if await self._changed() or waited_s >= RETRY_S:
                waited_s = 0.0
                await self._apply(self.states.values())

    async def _changed(self) -> bool:
        """Whether the file says something else now; one that cannot be right leaves all as it is."""
        try:
            content = await asyncio.to_thread(read_bytes, self.path)
            if content == self._content and self.file_error is None:
                return False
            entries = self._parse(content)
        except InvalidSettings as error:
            if str(self.file_error) != str(error):
                self._events.emit(DeclaredFileInvalid(error))
            self.file_error = error
            return False
        self._content, self.file_error = content, None
        self._declare(entries)
        return True

    def _parse(self, content: bytes) -> Mapping[str, DeclaredAdapter]:
        return parse(content, self.path, self._allowed)

    def _declare(self, entries: Mapping[str, DeclaredAdapter]) -> None:
        """Note what is to be served now, and begin to unload what is not declared any more."""
        before = self.states
        self.states = {}
        for name, entry in entries.items():
            known = before.get(name)
            is_same = known is not None and known.entry.model_copy(update={"preload": entry.preload}) == entry
            self.states[name] = known if known is not None and is_same else DeclaredState(entry)
        for name in before.keys() - entries.keys():
            task = asyncio.create_task(self._unload(name))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, name: str) -> None:
        try:
            if self._lifecycle.registry.get(name) is not None:
                await self._lifecycle.unload(name, block=False)
        except LoRAPluginsError as error:  # somebody else has unloaded it at the same moment
            logger.debug("Adapter '%s', declared no more, was not unloaded: %s", name, error)

    async def _apply(self, states: Iterable[DeclaredState]) -> None:
        waiting = [state for state in states if not state.is_applied]
        if waiting:
            await asyncio.gather(*(self._serve(state) for state in waiting))
        served = sum(state.is_applied for state in self.states.values())
        failed = sum(state.error is not None for state in self.states.values())
        reconciled = DeclaredSetReconciled(len(self.states), served, failed)
        if reconciled != self._told:
            self._told = reconciled
            self._events.emit(reconciled)

    async def _serve(self, state: DeclaredState) -> None:
        entry = state.entry
        async with self._places:
            if self.states.get(entry.name) is not state:
                return  # the file has changed meanwhile
            try:
                adapter = await self._lifecycle.declare(entry.name, entry.place, entry.digest)
                if entry.pin:
                    await self._lifecycle.pin(entry.name)
                elif adapter.is_pinned:
                    await self._lifecycle.unpin(entry.name)
            except LoRAPluginsError as error:
                is_new = state.error is None or str(state.error) != str(error)
                state.error = error
                if is_new:
                    self._events.emit(NotServed("declared", entry.name, error))
            else:
                state.is_applied, state.error = True, None
