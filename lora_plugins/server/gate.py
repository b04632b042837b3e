"""Where a request waits until its adapter is staged on every worker; no vLLM, no torch.

Only the requests of that adapter wait. Once it is staged and it is its turn, they go in; the lease that keeps it in
host memory stays until the last of them has finished, and a little longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cachetools import LRUCache

from lora_plugins.errors import LoRAPluginsError
from lora_plugins.events import Events, Found, GatePassed, GateRefused
from lora_plugins.server.leases import REMEMBERED, Entry, Hold, Leases, Request
from lora_plugins.server.refusals import Refusals
from lora_plugins.server.staging import Rpc, Staging
from lora_plugins.server.turns import Turns

LINGER_S = 2.0
QUANTUM_S = 1.0
ROOM_TIMEOUT_S = 60.0
TICKET_S = 5.0


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
        self._events = events or Events()
        self._linger_s = linger_s
        self._turns = Turns(slots, quantum_s)
        self._leases = Leases()
        self._staging = Staging(rpc, self._turns, self._leases, self._events, room_timeout_s)
        self.refusals = Refusals()
        self.uris = self._staging.uris  # what adapters were loaded by, by id; whoever loads one notes it
        self.last_used_at: LRUCache[int, float] = LRUCache(REMEMBERED)  # by adapter id, in seconds since 1970

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
        entry = self._leases.of(request)
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
                        await self._staging.place(entry)
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
        entry = self._leases.get(adapter_id)
        return [] if entry is None else [hold.request_id for hold in entry.holds]

    async def stage(self, request: Request) -> None:
        """Bring an adapter into every worker's host memory; it stays as long as it would after a request.

        Raises:
            LoRAPluginsError: a worker cannot stage it; NoFreeSlot where running requests need all room for too long.
        """
        entry = self._leases.of(request)
        entry.users += 1
        try:
            await self._staging.stage_in_time(entry)
        finally:
            self._no_longer(entry)

    async def retire(self, adapter_id: int) -> None:
        """Wait until the last request of an adapter has left, then remove it from every worker.

        A request that was on its way meanwhile is still served; the adapter is removed again after it.
        """
        self._leases.retired[adapter_id] = True
        entry = self._leases.get(adapter_id)
        if entry is not None and entry.users:
            if entry.drained is None:
                entry.drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(entry.drained)
            entry = self._leases.get(adapter_id)
        if entry is not None and entry.users == 0:
            self._leases.forget(entry)
        if entry is None or entry.users == 0:
            await self._staging.remove(adapter_id)

    async def _take_turn(self, entry: Entry) -> Found | None:
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
                await self._staging.stage(entry)
                found = entry.found
            await turn
            return found
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._turns.give_back(adapter_id)
            turn.cancel()
            raise

    def _no_longer(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if entry.drained is not None:
            entry.drained.set_result(None)
            entry.drained = None
        self._staging.stop(entry)
        linger_s = 0.0 if entry.request.lora_int_id in self._leases.retired else self._linger_s
        entry.linger = asyncio.get_running_loop().call_later(linger_s, self._idle, entry)

    def _idle(self, entry: Entry) -> None:
        if entry.users == 0 and self._leases.forget(entry):
            task = asyncio.get_running_loop().create_task(self._staging.release(entry))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
