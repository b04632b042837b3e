"""The server's lives: the engine or its worker is killed in the midst, and the next server restores what was served."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Self

from benchmarks.soak.clients import Target, connect
from benchmarks.soak.journal import Journal
from benchmarks.soak.operators import Operator
from benchmarks.soak.processes import Processes
from benchmarks.soak.server import Surroundings, kill
from benchmarks.soak.source_faults import SourceFaults
from benchmarks.soak.world import World
from testbed.server import Server

# An API server whose engine has died ends by itself.
LONGEST_END_S = 60.0
_WRITTEN_S = 2.0  # what is served is written half a second after it has changed


class Lives:
    """Starts servers one after the other over one store; the last one ends with the block.

    Attributes:
        server: the present one. processes: those of the present one.
        logs: what each said until it was killed or ended; what vLLM says then is its own.
    """

    server: Server
    processes: Processes

    def __init__(self, surroundings: Surroundings, target: Target, journal: Journal) -> None:
        self._surroundings = surroundings
        self._target = target
        self._journal = journal
        self._stack = ExitStack()
        self.logs: list[str] = []

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
        self._target.url = self.server.url
        self._journal.write("server", "start", 0, time.monotonic() - began)

    async def kill_and_restart(self, victim: str, world: World, operator: Operator, faults: SourceFaults) -> None:
        """Kill the engine or its worker while clients ask, and start the next server; nothing is changed meanwhile."""
        async with AsyncExitStack() as quiet:
            await quiet.enter_async_context(faults.idle)
            for one in world.names:
                await quiet.enter_async_context(one.lock)
            before = await self._written_down()
            world.oracle.down.open(0, time.monotonic())
            self.logs.append(self.server.log())
            kill(self.server, victim)
            self._journal.write("server", "kill", victim)
            await self._ends()
            self._target.url = ""
            await asyncio.to_thread(self._stack.close)
            for one in world.names:
                is_held, is_pinned, is_certain = one.is_held, one.is_pinned, one.is_certain
                if not one.is_blocked:  # what is blocked stays so
                    world.may_be_resolved(one)
                one.is_held, one.is_pinned, one.is_certain = is_held, is_pinned, is_certain
            await self._start()
            world.oracle.down.close(0, time.monotonic())
            await self._has_asked(before)
            await self._compare(before, await self._views(), world, operator)

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
        for name, view in before.items():
            one = world.by_name.get(name)
            if one is None or view["state"] != "serving":
                continue
            now = after.get(name)
            if now is None:
                if one.current is not None:
                    self._journal.violation("a restart restores", "it is not served any more", model=name)
                one.is_certain = one.is_held = one.is_pinned = False
                continue
            if now["pinned"] != view["pinned"] or now["pinned_digest"] != view["pinned_digest"]:
                text = f"pinned {view['pinned']}, held at {view['pinned_digest']}: then {now['pinned']}, "
                self._journal.violation("a restart restores", text + str(now["pinned_digest"]), model=name)
            one.is_held = now["pinned_digest"] is not None
            version = await operator.look(one)
            if not one.is_held and version != one.current:
                text = f"version {version}, and the source has {one.current}"
                self._journal.violation("a restart restores", text, model=name)
        for one in world.names:
            if one.name not in after:
                one.is_certain = one.is_held = one.is_pinned = False
        self._journal.write("server", "restored", len(after), served_before=len(before))

    async def _written_down(self) -> dict[str, dict[str, Any]]:
        """What has been served long enough; a client's request may load a name just before the kill."""
        earlier = await self._views()
        await asyncio.sleep(_WRITTEN_S)
        return {name: view for name, view in (await self._views()).items() if name in earlier}

    async def _views(self) -> dict[str, dict[str, Any]]:
        async with connect(self._target.url) as client:
            answer = await client.get("/v1/loras")
            return {view["lora_name"]: view for view in answer.json()["loras"] if view["state"] == "serving"}
