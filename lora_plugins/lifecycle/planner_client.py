"""The API server's calls to the planners in its engines: load, pin, move, retire, pause; and the adapters' states.

Runs in the event loop of each API server; a planner (`scheduler/planner.py`) runs in the scheduler of each engine
process. A call is one of vLLM's utility calls with plain messages of `scheduler/messages.py`, and goes to every engine:
with data parallelism each has a planner of its own. The answers come back as one. No vLLM, no torch.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import AdapterLoaded, Events, NotServed
from lora_plugins.scheduler.messages import (
    AdapterSpec,
    AdapterState,
    Outcome,
    PlannerFigures,
    RequestsOfName,
    from_plain,
    to_plain,
)
from lora_plugins.scheduler.pauses import PauseMode

REMEMBERED = 10_000
T = TypeVar("T")

# Calls a utility of every engine with plain values, and returns the answers by engine number.
Ask = Callable[[str, tuple[Any, ...]], Awaitable[Mapping[int, Any]]]


class AdapterStates:
    """The states of all adapters at one moment, all engines together.

    Args:
        engines: of each engine, the states by engine id.
    """

    def __init__(self, engines: Sequence[Mapping[int, AdapterState]]) -> None:
        self._engines = engines
        self._in_use: dict[str, list[AdapterState]] = {}
        for state in (it for engine in engines for it in engine.values() if it.held or it.running):
            self._in_use.setdefault(state.name, []).append(state)

    def __call__(self, engine_id: int) -> AdapterState:
        """One version's state: loaded or active only where every engine has the version so."""
        here = [engine[engine_id] for engine in self._engines if engine_id in engine]
        # An engine without a state for the id does not have the version.
        is_everywhere = bool(here) and len(here) == len(self._engines)
        return AdapterState(
            engine_id,
            here[0].name if here else "",
            size_bytes=max((one.size_bytes for one in here), default=0),
            is_loaded=is_everywhere and all(one.is_loaded for one in here),
            is_active=is_everywhere and all(one.is_active for one in here),
            is_pinned=any(one.is_pinned for one in here),
            rank=max((one.rank for one in here), default=0),
            held=tuple(request_id for one in here for request_id in one.held),
            running=tuple(request_id for one in here for request_id in one.running),
        )

    def of_name(self, name: str, engine_id: int, besides: Container[int] = ()) -> AdapterState:
        """The served version's state, with requests for earlier versions, but for engine ids in `besides`."""
        in_use = [it for it in self._in_use.get(name, ()) if it.engine_id not in besides]
        held = tuple(request_id for it in in_use for request_id in it.held)
        running = tuple(request_id for it in in_use for request_id in it.running)
        return replace(self(engine_id), held=held, running=running)


class PlannerClient:
    """Loads, pins and retires adapters in the engines; a `request` is one of vLLM's `LoRARequest`s.

    Args:
        ask: calls a utility of every engine.
        size_of: the bytes of the adapter at a path, where this process knows: engines then look at no file system.

    Attributes:
        used_at: time of the last request for an adapter, by engine id, in seconds since 1970.
    """

    def __init__(self, ask: Ask, events: Events, size_of: Callable[[str], int] = lambda _: 0) -> None:
        self._ask = ask
        self._events = events
        self._size_of = size_of
        self.used_at: LRUCache[int, float] = LRUCache(REMEMBERED)

    def used(self, request: Any) -> None:
        self.used_at[request.lora_int_id] = time.time()

    async def load(
        self,
        request: Any,
        *,
        uri: str | None = None,
        wants_slot: bool = True,
        succeeds: int | None = None,
        is_noted: bool = False,
    ) -> None:
        """Bring an adapter into every engine's host memory, and into a slot where one is idle.

        `uri`: the adapter's place, for workers that lack the files; None where the name is enough. `succeeds`: the
        engine id whose requests `move` has go on with the adapter. `is_noted`: the caller emits the event of a failure,
        under a stage of its own.

        Raises:
            LoRAPluginsError: an engine cannot load the adapter.
        """
        try:
            answers = await self._answers("lora_plugins_load", self._spec(request, uri), wants_slot, succeeds)
        except LoRAPluginsError as error:
            if not is_noted:
                self._events.emit(NotServed("load", request.lora_name, error))
            raise
        # An engine that had the adapter already says no time.
        loads = [(answer.size_bytes, answer.load_s) for answer in answers if answer.load_s is not None]
        if loads:
            size_bytes, load_s = (max(values) for values in zip(*loads, strict=True))
            self._events.emit(AdapterLoaded(request.lora_name, request.lora_path, size_bytes, load_s))

    async def move(self, engine_id: int) -> None:
        """Have requests of the id that an adapter `succeeds`, which every engine has loaded, go on with the adapter."""
        await self._typed(type(None), "lora_plugins_move", engine_id)

    async def pin(self, request: Any, *, uri: str | None = None) -> None:
        """Keep an adapter in every engine's host memory, and in a slot.

        Raises:
            LoRAPluginsError: an engine cannot load the adapter. NoFreeSlot: the pin would leave no slot for other
            adapters.
        """
        try:
            await self._answers("lora_plugins_pin", self._spec(request, uri))
        except BaseException:
            # Some engines may have pinned the adapter already; if the caller leaves, all will.
            await self.unpin(request.lora_int_id)
            raise

    async def unpin(self, engine_id: int) -> None:
        """Let a pinned adapter go when others need its place."""
        await self._typed(bool, "lora_plugins_unpin", engine_id)

    async def retire(self, engine_id: int, refusal: LoRAPluginsError | None = None) -> None:
        """Evict an adapter as soon as no request uses the adapter, and wait for the eviction.

        With a `refusal`, requests that wait, and later requests, are refused with the error.
        """
        await self._typed(Outcome, "lora_plugins_retire", engine_id, refusal)

    async def pause(self, name: str, mode: PauseMode) -> RequestsOfName:
        """Have every engine hold new requests of a name; returns the name's requests in all engines."""
        answers = (await self._typed(RequestsOfName, "lora_plugins_pause", name, mode)).values()
        return RequestsOfName(
            tuple(request_id for one in answers for request_id in one.request_ids),
            tuple({client for one in answers for client in one.clients}),
        )

    async def paused(self, name: str, clients: Sequence[str] = ()) -> None:
        """Wait until no engine runs a request of a paused name, or until the pause has ended.

        `clients`: clients' requests that run, or were aborted; their next parts run, or end, in whichever engine.
        """
        # While one engine waits, another may get the next part: all must say at once that nothing runs.
        while not all((await self._typed(bool, "lora_plugins_paused", name, clients)).values()):
            pass
        if clients:  # a client may use the id of its request again
            await self._typed(bool, "lora_plugins_paused", name, ())

    async def resume(self, name: str) -> None:
        await self._typed(type(None), "lora_plugins_resume", name)

    async def end_api_server(self, number: int) -> None:
        """Have the engines end the requests of an API server that has died: nobody reads their answers."""
        await self._typed(type(None), "lora_plugins_end_api_server", number)

    async def states(self) -> AdapterStates:
        answers = await self._typed(list[AdapterState], "lora_plugins_residency")
        return AdapterStates([{state.engine_id: state for state in states} for states in answers.values()])

    async def figures(self) -> Mapping[int, PlannerFigures]:
        """Figures of each engine's planner, by the engine's number."""
        return await self._typed(PlannerFigures, "lora_plugins_figures")

    async def _answers(self, utility: str, *arguments: Any) -> list[Outcome]:
        answers = list((await self._typed(Outcome, utility, *arguments)).values())
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return answers

    async def _typed(self, kind: type[T], utility: str, *arguments: Any) -> dict[int, T]:
        """Call a utility with messages, and return the answers as messages of type `kind`."""
        answers = await self._ask(utility, tuple(to_plain(argument) for argument in arguments))
        return {number: from_plain(kind, answer) for number, answer in answers.items()}

    def _spec(self, request: Any, uri: str | None) -> AdapterSpec:
        size_bytes = self._size_of(request.lora_path)
        return AdapterSpec(request.lora_int_id, request.lora_name, request.lora_path, uri, size_bytes=size_bytes)
