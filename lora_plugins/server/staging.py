"""How an adapter gets into every worker's host memory and into a slot, asked for by RPC; no vLLM, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from lora_plugins import errors
from lora_plugins.errors import LoRAPluginsError, NoFreeSlot, SourceUnavailable
from lora_plugins.events import AdapterReady, Events, Found
from lora_plugins.server.leases import Entry, Leases, Load
from lora_plugins.server.turns import Turns

_STAGE_TIMEOUT_S = 300.0
_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.05
_STAGED = ("staged", "placing", "ready")

# Calls a method on every worker and returns their answers.
Rpc = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]


class Staging:
    """Leases adapters on the workers and has them brought, each once for all who wait for it.

    Args:
        rpc: reaches every worker. turns: who has one, and how many slots can change their owner.
        leases: what this server uses. events: told what was brought.
        room_timeout_s: how long one may wait for host memory that running requests lease.

    Attributes:
        uris: what adapters were loaded by, for workers that lack their files; by adapter id.
    """

    def __init__(self, rpc: Rpc, turns: Turns, leases: Leases, events: Events, room_timeout_s: float) -> None:
        self._rpc = rpc
        self._turns = turns
        self._leases = leases
        self._events = events
        self._room_timeout_s = room_timeout_s
        self._next_for_room = asyncio.Lock()
        self.owner = f"{os.getpid()}.{os.urandom(4).hex()}"
        self.uris: dict[int, str] = {}

    async def stage(self, entry: Entry) -> None:
        """Bring it into every worker's host memory; where that has no room, it is left for its turn.

        Raises:
            LoRAPluginsError: a worker cannot stage it.
        """
        await self._shared(entry, "staging", self._stage)

    async def stage_in_time(self, entry: Entry) -> None:
        """As `stage`; where there is no room, what has no turn makes some.

        Raises:
            LoRAPluginsError: a worker cannot stage it; NoFreeSlot where running requests need all room for too long.
        """
        deadline = time.monotonic() + self._room_timeout_s
        while not entry.is_leased:
            await self.stage(entry)
            if not entry.is_leased:
                if time.monotonic() > deadline:
                    raise NoFreeSlot(
                        "a host tier of which running requests need all",
                        expected="room for one more",
                        remedy="ask again, or raise --max-cpu-loras or LORA_PLUGINS_HOST_MAX_BYTES",
                        adapter=entry.request.lora_name,
                    )
                await self._release_those_without_a_turn()
                await asyncio.sleep(_LONGEST_WAIT_S)

    async def place(self, entry: Entry) -> None:
        """Bring it into a slot of every worker, for one that has its turn; where none is idle, the loop will copy it.

        Raises:
            LoRAPluginsError: a worker cannot stage it, or has no room for too long.
        """
        await self._shared(entry, "placing", self._place)

    def stop(self, entry: Entry) -> None:
        """Nobody waits for it any more."""
        for which in ("staging", "placing"):
            task: asyncio.Task[None] | None = getattr(entry, which)
            if task is not None:
                task.cancel()
                setattr(entry, which, None)
                entry.load = None

    async def release(self, entry: Entry) -> None:
        """End its lease on every worker; what was retired goes with it."""
        adapter_id = entry.request.lora_int_id
        method = "lora_plugins_remove" if adapter_id in self._leases.retired else "lora_plugins_release"
        await self._rpc(method, (self.owner, adapter_id))

    async def remove(self, adapter_id: int) -> None:
        """End the lease of an adapter, if there is one, and have every worker forget it."""
        self.uris.pop(adapter_id, None)
        await self._rpc("lora_plugins_remove", (self.owner, adapter_id))

    async def _shared(self, entry: Entry, which: str, bring: Callable[[Entry], Coroutine[Any, Any, None]]) -> None:
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

    async def _stage(self, entry: Entry) -> None:
        """Bring it into every worker's host memory; where that has no room, leave it for its turn."""
        with contextlib.suppress(NoFreeSlot):
            while not await self._until(entry, _STAGED, await self._ask(entry, None), None):
                pass

    async def _place(self, entry: Entry) -> None:
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

    def _tell_ready(self, entry: Entry, began_at: float) -> None:
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

    async def _ask(self, entry: Entry, busy: list[int] | None) -> list[dict[str, Any]]:
        """Lease it and have the workers begin; into a slot too, of none of `busy`, unless that is None."""
        # An id has one path; a request from before it was replaced gets what is there now, as with vLLM.
        request = (self._leases.get(entry.request.lora_int_id) or entry).request
        origin: dict[str, Any] = {
            "size_bytes": await asyncio.to_thread(_size_bytes, request.lora_path),
            "is_3d_lora_weight": getattr(request, "is_3d_lora_weight", False),
            "uri": self.uris.get(request.lora_int_id),
        }
        entry.is_leased = True
        what = (self.owner, request.lora_name, request.lora_int_id, request.lora_path, origin, busy)
        answers = self._noted(await self._rpc("lora_plugins_stage", what))
        entry.found = entry.found or _worst_found(answers)
        if entry.found is Found.STORE and entry.load is None:
            entry.load = Load(origin["size_bytes"], time.monotonic())
        return answers

    async def _until(
        self,
        entry: Entry,
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
            self._turns.pinned = frozenset(answer.get("pinned", self._turns.pinned))
            for adapter_id in answer.get("displaced", ()):
                entry = self._leases.get(adapter_id)
                if entry is not None:
                    entry.is_placed = False
        return answers

    async def _wait_for_room(self, entry: Entry, deadline: float) -> list[dict[str, Any]]:
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

    async def _give_lease_up(self, entry: Entry) -> None:
        entry.is_leased = False
        entry.load = None
        await self.release(entry)

    async def _release_those_without_a_turn(self) -> None:
        for entry in self._leases.all():
            adapter_id = entry.request.lora_int_id
            if entry.is_leased and adapter_id not in self._turns.in_flight() and self._leases.forget(entry):
                await self.release(entry)  # of one that nobody uses, or that waits for its turn


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
