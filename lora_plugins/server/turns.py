"""Which adapters have requests in the engine at one time, so that none waits for ever; no vLLM, no torch.

vLLM's scheduler passes over a waiting request while every slot belongs to an adapter with running requests, for as long
as those go on. Here at most as many adapters as there are slots are let in. An adapter whose turn has lasted for its
quantum gets no further request while another waits: what is running ends, and the turn passes on, first come first
served. The longest wait is so bounded by the quantum and the longest request, times the number of those before it. A
pinned adapter has a slot of its own and takes nobody's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Turn:
    since: float
    in_flight: int = 0


class Turns:
    """Lets the requests of at most `slots` adapters in at once. For one event loop.

    Args:
        slots: vLLM's `max_loras`, less those of pinned adapters.
        quantum_s: how long an adapter may take further requests while another waits.
    """

    def __init__(self, slots: int, quantum_s: float) -> None:
        self.slots = slots
        self.pinned: frozenset[int] = frozenset()  # adapters that have a slot beside these
        self._quantum_s = quantum_s
        self._turns: dict[int, _Turn] = {}
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}  # the one that came first stands first
        self._lacking_room = 0  # adapters that have a turn and wait for host memory which others lease

    def try_take(self, adapter_id: int) -> bool:
        """Let one request of this adapter in, if that needs no waiting."""
        turn = self._turns.get(adapter_id)
        if turn is None:
            if adapter_id not in self.pinned and (self._is_contended or self._are_all_taken):
                return False
            turn = self._turns[adapter_id] = _Turn(time.monotonic())
        elif adapter_id not in self.pinned and self._is_contended and time.monotonic() - turn.since >= self._quantum_s:
            return False
        turn.in_flight += 1
        return True

    async def take(self, adapter_id: int) -> None:
        """Let one request of this adapter in, when it is its turn; needs a `give_back`."""
        if self.try_take(adapter_id):
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(adapter_id, []).append(place)
        self._pass_on()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(adapter_id)
            else:
                self._step_out(adapter_id, place)
            raise

    def give_back(self, adapter_id: int) -> None:
        """One request of this adapter has finished."""
        turn = self._turns[adapter_id]
        turn.in_flight -= 1
        if turn.in_flight == 0:
            del self._turns[adapter_id]
            self._pass_on()

    def in_flight(self) -> list[int]:
        """The adapters whose turn it is."""
        return list(self._turns)

    @contextmanager
    def lacking_room(self) -> Iterator[None]:
        """Inside, an adapter that has a turn waits for room, so nobody else gets one, and turns end."""
        self._lacking_room += 1
        try:
            yield
        finally:
            self._lacking_room -= 1
            self._pass_on()

    @property
    def _is_contended(self) -> bool:
        return bool(self._waiting) or self._lacking_room > 0

    @property
    def _are_all_taken(self) -> bool:
        return sum(adapter_id not in self.pinned for adapter_id in self._turns) >= self.slots

    def _step_out(self, adapter_id: int, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(adapter_id, [])
        if place in places:
            places.remove(place)
        if not places:
            self._waiting.pop(adapter_id, None)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and not self._lacking_room:
            adapter_id = next(iter(self._waiting))
            turn = self._turns.get(adapter_id)
            if turn is None:
                if self._are_all_taken:
                    return
                turn = self._turns[adapter_id] = _Turn(time.monotonic())
            else:
                turn.since = time.monotonic()  # nobody stands before it, so it goes on
            for place in self._waiting.pop(adapter_id):
                if not place.done():
                    place.set_result(None)
                    turn.in_flight += 1
            if turn.in_flight == 0:
                del self._turns[adapter_id]
