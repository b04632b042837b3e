"""Where a request waits until its adapter is staged on every worker; no vLLM, no torch.

Only the requests of that adapter wait. Once it is staged and it is its turn, they go in; the lease that keeps it in
host memory stays until the last of them has finished, and a little longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from cachetools import LRUCache

from lora_plugins import errors
from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, SourceUnavailable
from lora_plugins.events import AdapterReady, Events, Found, GatePassed, GateRefused
from lora_plugins.server.refusals import Refusals
from lora_plugins.server.turns import Turns

LINGER_S = 2.0
QUANTUM_S = 1.0
ROOM_TIMEOUT_S = 60.0
TICKET_S = 5.0
_STAGE_TIMEOUT_S = 300.0
_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.05
_REMEMBERED = 10_000
_STAGED = ("staged", "placing", "ready")

# Calls a method on every worker and returns their answers.
Rpc = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]


class Request(Protocol):
    """The part of vLLM's `LoRARequest` that the gate needs."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class _Load:
    """An adapter that is on its way from its directory; times are `time.monotonic()`."""

    size_bytes: int
    asked_at: float = field(default_factory=time.monotonic)
    staged_at: float | None = None


@dataclass(eq=False)
class _Entry:
    """One adapter that this server's requests use, or did a moment ago; its lease on the workers is held."""

    request: Request
    users: int = 0
    is_leased: bool = False
    is_placed: bool = False  # in a slot of every worker, as far as this server was told
    found: Found | None = None  # where it was when the task that brings it, or brought it last, began
    load: _Load | None = None
    staging: asyncio.Task[None] | None = None
    placing: asyncio.Task[None] | None = None
    linger: asyncio.TimerHandle | None = None
    tickets: deque[tuple[Hold, asyncio.TimerHandle]] = field(default_factory=deque)
    holds: set[Hold] = field(default_factory=set)
    drained: asyncio.Future[None] | None = None  # done when the last user has gone


@dataclass(eq=False)
class Hold:
    """One request's right to be in the engine; `Gate.leave` ends it."""

    entry: _Entry
    request_id: str = ""


class Gate:
    """Stages adapters on all workers before their requests go in.

    Args:
        rpc: reaches every worker. slots: vLLM's `max_loras`. events: told who waited, and what was brought.
        linger_s: how long an idle adapter's lease is kept. quantum_s: as in `Turns`.
        room_timeout_s: how long one may wait for host memory that running requests lease.
    """

    def __init__(
        self,
        rpc: Rpc,
        *,
        slots: int,
        events: Events | None = None,
        linger_s: float = LINGER_S,
        quantum_s: float = QUANTUM_S,
        room_timeout_s: float = ROOM_TIMEOUT_S,
    ) -> None:
        self._rpc = rpc
        self._events = events or Events()
        self._linger_s = linger_s
        self._room_timeout_s = room_timeout_s
        self._turns = Turns(slots, quantum_s)
        self._next_for_room = asyncio.Lock()
        self._owner = f"{os.getpid()}.{os.urandom(4).hex()}"
        self._entries: dict[int, _Entry] = {}
        self.refusals = Refusals()
        self.uris: dict[int, str] = {}  # what adapters were loaded by, for workers that lack their files
        self._retired: LRUCache[int, bool] = LRUCache(_REMEMBERED)
        self.last_used_at: LRUCache[int, float] = LRUCache(_REMEMBERED)  # by adapter id, in seconds since 1970

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[None]:
        """Inside, the adapter is staged everywhere, and has its turn; raises what `enter` raises."""
        hold = await self.enter(request)
        try:
            yield
        finally:
            self.leave(hold)

    async def enter(self, request: Request, request_id: str = "", *, load: bool = False) -> Hold:
        """Wait until the adapter is staged everywhere and it is its turn; needs a `leave`.

        `load` says that no request stands behind it.

        Raises:
            LoRAPluginsError: a worker cannot stage it, or it was refused meanwhile (`refusals`).
        """
        entry = self._entry_of(request)
        self.last_used_at[request.lora_int_id] = time.time()
        if entry.tickets:
            hold, timer = entry.tickets.popleft()
            timer.cancel()
            hold.request_id = request_id
            return hold
        entry.users += 1
        came_at = time.monotonic()
        found = Found.SLOT if entry.is_placed else None
        try:
            with self.refusals.refusing(request.lora_int_id):
                found = await self._take_turn(entry) or found
                try:
                    while not entry.is_placed:
                        await self._shared(entry, "placing", self._place)
                        found = found or entry.found
                except BaseException:
                    self._turns.give_back(request.lora_int_id)
                    raise
        except BaseException as error:
            self._no_longer(entry)
            if isinstance(error, LoRAPluginsError):
                self._events.emit(GateRefused(request.lora_name, error, time.monotonic() - came_at, load))
            raise
        found = found or Found.SLOT  # another request had it placed while this one waited for its turn
        self._events.emit(GatePassed(request.lora_name, found, time.monotonic() - came_at, load))
        hold = Hold(entry, request_id)
        entry.holds.add(hold)
        return hold

    def leave(self, hold: Hold) -> None:
        """A request has finished."""
        hold.entry.holds.discard(hold)
        self._turns.give_back(hold.entry.request.lora_int_id)
        self._no_longer(hold.entry)

    async def admit(self, request: Request) -> None:
        """As `enter`, for a request that will enter in a moment: it then goes in at once.

        Raises:
            LoRAPluginsError: a worker cannot stage it.
        """
        hold = await self.enter(request)
        entry = hold.entry

        def expire() -> None:
            entry.tickets.popleft()  # the oldest, as all last for the same time
            self.leave(hold)

        entry.tickets.append((hold, asyncio.get_running_loop().call_later(TICKET_S, expire)))

    # --- for those who change what is served ---

    def in_flight(self, adapter_id: int) -> list[str]:
        """The ids of the requests that are in the engine, or about to be."""
        entry = self._entries.get(adapter_id)
        return [] if entry is None else [hold.request_id for hold in entry.holds]

    async def stage(self, request: Request) -> None:
        """Bring an adapter into every worker's host memory; it stays as long as it would after a request.

        Raises:
            LoRAPluginsError: a worker cannot stage it; NoFreeSlot where running requests need all room for too long.
        """
        entry, deadline = self._entry_of(request), time.monotonic() + self._room_timeout_s
        entry.users += 1
        try:
            while not entry.is_leased:
                await self._shared(entry, "staging", self._stage)
                if not entry.is_leased:
                    if time.monotonic() > deadline:
                        raise NoFreeSlot(
                            "a host tier of which running requests need all",
                            expected="room for one more",
                            remedy="ask again, or raise --max-cpu-loras or LORA_PLUGINS_HOST_MAX_BYTES",
                            adapter=request.lora_name,
                        )
                    await self._release_those_without_a_turn()
                    await asyncio.sleep(_LONGEST_WAIT_S)
        finally:
            self._no_longer(entry)

    async def retire(self, adapter_id: int) -> None:
        """Wait until the last request of an adapter has left, then remove it from every worker.

        A request that was on its way meanwhile is still served; the adapter is removed again after it.
        """
        self._retired[adapter_id] = True
        entry = self._entries.get(adapter_id)
        if entry is not None and entry.users:
            if entry.drained is None:
                entry.drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(entry.drained)
            entry = self._entries.get(adapter_id)
        if entry is not None and entry.users == 0:
            self._forget(entry)
        if entry is None or entry.users == 0:
            self.uris.pop(adapter_id, None)
            await self._rpc("lora_plugins_remove", (self._owner, adapter_id))

    def _entry_of(self, request: Request) -> _Entry:
        entry = self._entries.get(request.lora_int_id)
        if entry is None or entry.request.lora_path != request.lora_path:
            entry = self._entries[request.lora_int_id] = _Entry(request)
        if entry.linger is not None:
            entry.linger.cancel()
            entry.linger = None
        return entry

    async def _take_turn(self, entry: _Entry) -> Found | None:
        """Wait for the turn, and have the adapter staged meanwhile; one that cannot be staged waits no longer.

        Returns where it was found, if it was asked for here.
        """
        adapter_id = entry.request.lora_int_id
        if self._turns.try_take(adapter_id):
            return None
        turn = asyncio.get_running_loop().create_task(self._turns.take(adapter_id))
        found = None
        try:
            if not entry.is_leased and entry.placing is None:  # that may wait for room, without any of it
                await self._shared(entry, "staging", self._stage)
                found = entry.found
            await turn
            return found
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._turns.give_back(adapter_id)
            turn.cancel()
            raise

    async def _shared(self, entry: _Entry, which: str, bring: Callable[[_Entry], Coroutine[Any, Any, None]]) -> None:
        """Wait for `bring`, which runs once for all who wait for it."""
        task: asyncio.Task[None] | None = getattr(entry, which)
        if task is None:
            entry.found = None
            task = asyncio.get_running_loop().create_task(bring(entry))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            setattr(entry, which, task)
        try:
            await asyncio.shield(task)
        finally:
            if task.done() and getattr(entry, which) is task:
                setattr(entry, which, None)

    def _no_longer(self, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if entry.drained is not None:
            entry.drained.set_result(None)
            entry.drained = None
        for which in ("staging", "placing"):  # nobody waits for it any more
            task: asyncio.Task[None] | None = getattr(entry, which)
            if task is not None:
                task.cancel()
                setattr(entry, which, None)
                entry.load = None
        linger_s = 0.0 if entry.request.lora_int_id in self._retired else self._linger_s
        entry.linger = asyncio.get_running_loop().call_later(linger_s, self._idle, entry)

    def _idle(self, entry: _Entry) -> None:
        if entry.users == 0 and self._forget(entry):
            task = asyncio.get_running_loop().create_task(self._release(entry))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _forget(self, entry: _Entry) -> bool:
        """Count an adapter as leased no longer; False where the lease is another one's by now."""
        entry.is_leased = entry.is_placed = False
        adapter_id = entry.request.lora_int_id
        if self._entries.get(adapter_id) is not entry:
            return False  # another path has replaced it
        if entry.users == 0:
            if entry.linger is not None:
                entry.linger.cancel()
            del self._entries[adapter_id]
        return True

    async def _release(self, entry: _Entry) -> None:
        """End its lease on every worker; what was retired goes with it."""
        adapter_id = entry.request.lora_int_id
        method = "lora_plugins_remove" if adapter_id in self._retired else "lora_plugins_release"
        await self._rpc(method, (self._owner, adapter_id))

    # --- what it takes to bring an adapter ---

    async def _stage(self, entry: _Entry) -> None:
        """Bring it into every worker's host memory; where that has no room, leave it for its turn."""
        with contextlib.suppress(NoFreeSlot):
            while not await self._until(entry, _STAGED, await self._ask(entry, None), None):
                pass

    async def _place(self, entry: _Entry) -> None:
        """Bring it into a slot of every worker; where none is idle, the loop will copy it."""
        if entry.staging is not None:
            await asyncio.shield(entry.staging)  # else its failure would end the lease that this one takes
        began_at = time.monotonic()
        busy, deadline = self._turns.in_flight, 0.0
        answers = await self._ask(entry, busy())
        while True:
            try:
                if await self._until(entry, ("ready", "staged"), answers, busy):
                    break
                answers = await self._ask(entry, busy())
            except NoFreeSlot:  # at once, or it turned out larger than it seemed; the workers know its size then
                deadline = deadline or time.monotonic() + self._room_timeout_s
                answers = await self._wait_for_room(entry, deadline)
        entry.is_placed = entry.is_leased  # given up meanwhile, where the requests that had the turn went away
        self._tell_ready(entry, began_at)

    def _tell_ready(self, entry: _Entry, began_at: float) -> None:
        load, entry.load = entry.load, None
        if load is None or load.staged_at is None:
            return
        place_s = time.monotonic() - max(load.staged_at, began_at)  # the wait for its turn is neither's
        self._events.emit(
            AdapterReady(
                entry.request.lora_name,
                entry.request.lora_path,
                load.size_bytes,
                load.staged_at - load.asked_at,
                place_s,
            )
        )

    async def _ask(self, entry: _Entry, busy: list[int] | None) -> list[dict[str, Any]]:
        """Lease it and have the workers begin; into a slot too, of none of `busy`, unless that is None."""
        # An id has one path; a request from before it was replaced gets what is there now, as with vLLM.
        request = self._entries.get(entry.request.lora_int_id, entry).request
        origin: dict[str, Any] = {
            "size_bytes": await asyncio.to_thread(_size_bytes, request.lora_path),
            "is_3d_lora_weight": getattr(request, "is_3d_lora_weight", False),
            "uri": self.uris.get(request.lora_int_id),
        }
        entry.is_leased = True
        what = (self._owner, request.lora_name, request.lora_int_id, request.lora_path, origin, busy)
        answers = self._noted(await self._rpc("lora_plugins_stage", what))
        entry.found = entry.found or _worst_found(answers)
        if entry.found is Found.STORE and entry.load is None:
            entry.load = _Load(origin["size_bytes"])
        return answers

    async def _until(
        self,
        entry: _Entry,
        states: tuple[str, ...],
        answers: list[dict[str, Any]],
        busy: Callable[[], list[int]] | None,
    ) -> bool:
        """Wait for one of `states` on every worker; False where it was removed meanwhile, and has to be asked for."""
        wait_s, deadline = _FIRST_WAIT_S, time.monotonic() + _STAGE_TIMEOUT_S
        while True:
            try:
                _raise_failure(answers)
            except LoRAPluginsError:
                await self._give_lease_up(entry)  # a worker forgets what failed once nobody leases it
                raise
            if entry.load and entry.load.staged_at is None and all(answer["state"] in _STAGED for answer in answers):
                entry.load.staged_at = time.monotonic()
            if all(answer["state"] in states for answer in answers):
                return True
            if any(answer["state"] == "absent" for answer in answers):
                return False
            if time.monotonic() > deadline:
                raise SourceUnavailable(
                    f"an adapter that is still being staged after {_STAGE_TIMEOUT_S:.0f} s",
                    expected="an end to it",
                    remedy="see the server's log",
                    adapter=entry.request.lora_name,
                )
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)
            among = None if busy is None else busy()
            answers = self._noted(await self._rpc("lora_plugins_stage_state", (entry.request.lora_int_id, among)))

    def _noted(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for answer in answers:
            self._turns.slots = max(1, answer.get("unpinned_slots", self._turns.slots))
            for adapter_id in answer.get("displaced", ()):
                if adapter_id in self._entries:
                    self._entries[adapter_id].is_placed = False
        return answers

    async def _wait_for_room(self, entry: _Entry, deadline: float) -> list[dict[str, Any]]:
        """Ask until there is room, in the order of arrival, so that nobody is overtaken for ever.

        What has no turn gives its lease up first, and those who have one get no further request for longer than their
        quantum.

        Raises:
            NoFreeSlot: there is still none at the deadline.
        """
        with self._turns.lacking_room():
            async with self._next_for_room:
                while True:
                    await self._release_those_without_a_turn()
                    answers = await self._ask(entry, self._turns.in_flight())
                    if not _lacks_room(answers):
                        return answers
                    if time.monotonic() > deadline:
                        await self._give_lease_up(entry)
                        _raise_failure(answers)
                    await asyncio.sleep(_LONGEST_WAIT_S)

    async def _give_lease_up(self, entry: _Entry) -> None:
        entry.is_leased = False
        entry.load = None
        await self._release(entry)

    async def _release_those_without_a_turn(self) -> None:
        for entry in list(self._entries.values()):
            adapter_id = entry.request.lora_int_id
            if entry.is_leased and adapter_id not in self._turns.in_flight() and self._forget(entry):
                await self._release(entry)  # of one that nobody uses, or that waits for its turn


def _lacks_room(answers: list[dict[str, Any]]) -> bool:
    return any(answer.get("kind") == NoFreeSlot.__name__ for answer in answers)


def _worst_found(answers: list[dict[str, Any]]) -> Found | None:
    """Where all workers had it; None where one says that it has no room."""
    found = [answer.get("found") for answer in answers]
    return next((place for place in (Found.STORE, Found.HOST, Found.SLOT) if place in found), None)


def _raise_failure(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        if answer["state"] == "failed":
            kind: type[LoRAPluginsError] = getattr(errors, answer["kind"])
            raise kind(**answer["fields"])


def _size_bytes(path: str) -> int:
    """What the weights will take of host memory, as far as their file says; the workers find out more."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.startswith("adapter_model."))
    except OSError:
        return 0  # the workers will say what is wrong with it
