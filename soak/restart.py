"""The server's lives: one of its processes is killed in the midst, and the next server restores what was served.

Sources may be gone before and after, and bits of the store may have changed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from soak.clients import Target, connect
from soak.journal import Journal
from soak.operators import Operator
from soak.oracle import Claim
from soak.server import Processes, Surroundings, kill
from soak.source_faults import SourceFaults
from soak.store_faults import FullDisk, Neighbour, damage
from soak.world import Name, World

# An API server whose engine has died ends by itself.
LONGEST_END_S = 60.0
_FULL_S = 2.0
_OUTAGE_S = 5.0  # for which clients ask while no source answers
_WRITTEN_S = 2.0  # what is served is written half a second after it has changed, a second after a failed write


@dataclass
class Lives:
    """Starts servers one after the other over one store; the last one ends with the block.

    Attributes:
        server: the present one. processes: those of the present one.
        down_s: seconds in which there was none, from a kill until all is as it was.
        logs: what each said until it was killed or ended; what vLLM says then is its own.
    """

    _surroundings: Surroundings
    _target: Target
    _journal: Journal
    logs: list[str] = field(default_factory=list)
    down_s: float = 0.0

    def __post_init__(self) -> None:
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.logs.append(self.server.log())
        await asyncio.to_thread(self._stack.close)

    async def _start(self) -> None:
        began = time.monotonic()
        self.server = await asyncio.to_thread(self._stack.enter_context, self._surroundings.start())
        self.processes = Processes(self.server)
        self._target.url, self._target.since = self.server.url, time.monotonic()
        self._journal.write("server", "start", 0, time.monotonic() - began)

    async def kill_and_restart(
        self,
        victim: str,
        world: World,
        operator: Operator,
        faults: SourceFaults,
        disk: FullDisk,
        neighbour: Neighbour,
        rng: random.Random,
        *,
        in_outage: bool,
    ) -> None:
        """Kill one process while clients ask, and start the next server; nobody changes anything meanwhile.

        The disk is full until shortly before, so that what has changed since is written down after a failed write. The
        neighbour removes what nobody uses while there is no server.

        With `in_outage` no source answers from before the kill until after the start. What was served, and whose bytes
        are sound, is served all the same.
        """
        await disk.fill(_FULL_S)
        async with AsyncExitStack() as quiet:
            for one in world.names:
                await quiet.enter_async_context(one.lock)
            for lock in (disk.idle, neighbour.idle):
                await quiet.enter_async_context(lock)
            await quiet.enter_async_context(faults.quiet())
            before, began = await self._written_down(), time.monotonic()
            async with AsyncExitStack() as gone:
                if in_outage:
                    await gone.enter_async_context(faults.outage())
                world.oracle.down.open(0, time.monotonic())
                self.logs.append(self.server.log())
                kill(self.server, victim)
                self._journal.write("server", "kill", victim)
                await self._ends()
                self._target.url = ""
                await asyncio.to_thread(self._stack.close)
                await neighbour.collect()
                damaged = await asyncio.to_thread(damage, self._surroundings.store, world, rng)
                self._journal.write("fault", "bits flipped", "store", names=damaged)
                for one in world.names:
                    is_held, is_pinned, is_certain = one.is_held, one.is_pinned, one.is_certain
                    if not one.is_blocked:  # what is blocked stays so
                        world.may_be_resolved(one)
                    one.is_held, one.is_pinned, one.is_certain = is_held, is_pinned, is_certain
                # Served from the store at first, and unloaded once the source has said that there is no such adapter.
                lost = [world.oracle.of(one.name) for one in world.names if one.current is None]
                for claims in lost:
                    claims.open(Claim.UNLOADING, time.monotonic())
                await self._start()
                world.oracle.down.close(0, time.monotonic())
                if in_outage:
                    # Directories answer all the same, and a server unloads what they have no more.
                    gone_names = {one.name for one in world.names if one.place == "filesystem" and one.current is None}
                    await self._check_served_at_once(before, gone_names | set(damaged), world)
                    await asyncio.sleep(_OUTAGE_S)
            await self._has_asked(before)
            for claims in lost:
                claims.close(Claim.UNLOADING, time.monotonic() + 1)
            # A damaged copy is fetched again once the server is ready.
            after = await self._listed([name for name in before if world.by_name[name].current is not None])
            await self._compare(before, after, world, operator)
            self.down_s += time.monotonic() - began

    async def _check_served_at_once(self, before: dict[str, dict[str, Any]], left_out: set[str], world: World) -> None:
        """With no remote source there, what was served is served as it was, but for the names that are left out."""
        stored = {name: view for name, view in before.items() if name not in left_out and "store" in view["tiers"]}
        now = await self._listed(stored)
        for name, view in stored.items():
            found, one = now.get(name, {}).get("digest"), world.by_name[name]
            # The poller may have swapped after the look before the kill.
            newest = world.bank.versions_by_digest.get(found) == (one.adapter, one.current)
            if found != view["digest"] and (one.is_held or not newest):
                text = f"{view['digest']} was served, and {found} is while no source answers"
                self._journal.violation("an outage takes nothing away", text, model=name)

    async def _listed(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """What is served once all of these names are, or after a while."""
        began = time.monotonic()
        while True:
            views = await self._views()
            if all(name in views for name in names) or time.monotonic() - began > LONGEST_END_S:
                return views
            await asyncio.sleep(0.5)

    async def _ends(self) -> None:
        began = time.monotonic()
        while self.server.process.poll() is None:
            if time.monotonic() - began > LONGEST_END_S:
                self._journal.violation("nothing waits for ever", "an API server whose engine has died did not end")
                return
            await asyncio.sleep(0.2)
        self._journal.write("server", "end after that", 0, time.monotonic() - began)

    async def _has_asked(self, before: dict[str, dict[str, Any]]) -> None:
        """Wait until the server has asked the sources of what it serves from the store."""
        if all(view["pinned_digest"] is not None for view in before.values()):
            return
        began = time.monotonic()
        while "The sources of all restored adapters have answered" not in self.server.log():
            if time.monotonic() - began > LONGEST_END_S:
                self._journal.violation("a restart restores", "sources were not asked for newer versions")
                return
            await asyncio.sleep(0.2)
        await asyncio.sleep(_WRITTEN_S)  # what a source has no more is unloaded

    async def _compare(
        self, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], world: World, operator: Operator
    ) -> None:
        """What was served, is; at the version that it was rolled back to, or the source's; pinned as it was."""
        names = iter(before)

        async def some() -> None:
            for name in names:
                await self._compare_one(world.by_name[name], before[name], after.get(name), operator)

        await asyncio.gather(*(some() for _ in range(4)))
        for one in world.names:
            if one.name not in after:
                one.is_certain = one.is_held = one.is_pinned = False
        self._journal.write("server", "restored", len(after), served_before=len(before))

    async def _compare_one(
        self, one: Name, before: dict[str, Any], after: dict[str, Any] | None, operator: Operator
    ) -> None:
        if after is None:
            if one.current is not None:
                self._journal.violation("a restart restores", "it is not served any more", model=one.name)
            one.is_certain = one.is_held = one.is_pinned = False
            return
        if after["pinned"] != before["pinned"] or after["pinned_digest"] != before["pinned_digest"]:
            text = f"pinned {before['pinned']}, held at {before['pinned_digest']}: then {after['pinned']}, "
            self._journal.violation("a restart restores", text + str(after["pinned_digest"]), model=one.name)
        one.is_held = after["pinned_digest"] is not None
        version = await operator.look(one)
        if not one.is_held and version not in (None, one.current):
            text = f"version {version}, and the source has {one.current}"
            self._journal.violation("a restart restores", text, model=one.name)

    async def _written_down(self) -> dict[str, dict[str, Any]]:
        """What has been served long enough; a client's request may load a name just before the kill."""
        earlier = await self._views()
        await asyncio.sleep(_WRITTEN_S)
        return {name: view for name, view in (await self._views()).items() if name in earlier}

    async def _views(self) -> dict[str, dict[str, Any]]:
        async with connect(self._target.url) as client:
            answer = await client.get("/v1/loras")
            return {view["lora_name"]: view for view in answer.json()["loras"] if view["state"] == "serving"}
