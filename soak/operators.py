"""Operators and trainers: the admin API's calls and changes of the sources, as random numbers say.

Each holds a name's lock for what it does, so that the oracle knows in which order one name changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from soak.bank import VERSIONS, WEIGHTS
from soak.clients import Target, connect
from soak.journal import Journal
from soak.oracle import DISK, Claim, code_of, of_source
from soak.server import SLOTS
from soak.world import ABSENT_TTL_S, FLIGHT_S, REVALIDATE_S, Name, World

MOST_PINNED = SLOTS - 2  # a pinned adapter is pinned twice while it is swapped, and one slot stays for all others
_REMEMBERED_S = REVALIDATE_S + FLIGHT_S


class Operator:
    """One that does one thing after the other; `do` is what a soak calls too, to end as it should."""

    def __init__(self, number: int, seed: int, world: World, target: Target, journal: Journal) -> None:
        self._rng = random.Random(f"{seed}-operator-{number}")
        self._world = world
        self._target = target
        self._journal = journal
        self._operations: dict[str, tuple[int, Callable[[Name], Awaitable[None]]]] = {
            "publish": (30, self._publish),
            "remove": (4, self._remove),
            "load": (16, self._load),
            "prefetch": (10, self._prefetch),
            "refresh": (16, self._refresh),
            "rollback": (8, self._roll_back),
            "pin": (4, self._pin),
            "unpin": (4, self._unpin),
            "unload": (20, self._unload),
            "block": (2, self._block),
            "vllm unload": (4, self._vllm_unload),
        }

    async def run(self, done: asyncio.Event, pause_s: float) -> None:
        """Until `done`; one operation every `pause_s` on average."""
        kinds = list(self._operations)
        weights = [weight for weight, _ in self._operations.values()]
        names = self._world.names
        while not done.is_set():
            (kind,) = self._rng.choices(kinds, weights)
            one = names[int(len(names) * self._rng.random())]
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            await self.do(kind, one)

    async def do(self, kind: str, one: Name) -> None:
        """One operation on one name, as soon as nobody else changes it."""
        async with one.lock:
            await self._operations[kind][1](one)

    # --- the sources ---

    async def _publish(self, one: Name) -> None:
        version = self._rng.choice([v for v in range(VERSIONS) if v != one.current])
        await self._world.publish(one, version, self._rng)
        self._journal.write("source", "publish", one.place, model=one.name, version=version)

    async def _remove(self, one: Name) -> None:
        if one.current is None:
            await self._publish(one)
            return
        await self._world.remove(one)
        self._journal.write("source", "remove", one.place, model=one.name)

    # --- the admin API ---

    async def _load(self, one: Name) -> None:
        body: dict[str, Any] = {"lora_name": one.name}
        if one.uri is not None:
            body["source"] = {"uri": one.uri}
        self._may_be_found(one)
        if await self._call("load", one, "POST", "/v1/loras", body) == 200:
            one.is_blocked = False
            await self.look(one)

    async def _prefetch(self, one: Name) -> None:
        if one.uri is not None and not one.is_certain:
            await self._load(one)
            return
        was_blocked = one.is_blocked
        if not was_blocked:
            self._may_be_found(one)
        if await self._call("prefetch", one, "POST", f"/v1/loras/{one.name}/prefetch") == 200:
            if was_blocked:
                self._journal.violation("a takedown holds", "a prefetch served what is blocked", model=one.name)
            await self.look(one)

    async def _refresh(self, one: Name) -> None:
        one.is_held = False
        if not one.is_blocked or one.is_certain:
            self._world.open_source_versions(one)
        status = await self._call("refresh", one, "POST", f"/v1/loras/{one.name}/refresh")
        if status == 200 and one.current is None:  # nobody else changes the source
            self._journal.violation("refusals are right", "a refresh found what was removed", model=one.name)
        elif status == 200:
            served = await self.look(one)
            if served is not None and served != one.current:
                text = f"version {served} after a refresh, and the source has {one.current}"
                self._journal.violation("a refresh serves the newest", text, model=one.name)

    async def _roll_back(self, one: Name) -> None:
        claims, now = self._world.oracle.of(one.name), time.monotonic()
        before = self._world.valid(one)
        for version in range(VERSIONS):
            if not one.is_blocked:
                claims.open(self._world.told(one, version), now)
        if await self._call("rollback", one, "POST", f"/v1/loras/{one.name}/rollback") == 200:
            one.is_held = True
            await self.look(one)
        else:
            for version in range(VERSIONS):
                if self._world.told(one, version) not in before:
                    claims.close(self._world.told(one, version), time.monotonic())

    async def _pin(self, one: Name) -> None:
        if sum(other.is_pinned for other in self._world.names) >= MOST_PINNED:
            return
        one.is_pinned = True  # at once: others look
        if await self._call("pin", one, "POST", f"/v1/loras/{one.name}/pin") != 200:
            one.is_pinned = False

    async def _unpin(self, one: Name) -> None:
        pinned = [other for other in self._world.names if other.is_pinned]
        if not one.is_pinned and pinned:
            other = pinned[0]
            if other.lock.locked():
                return
            async with other.lock:
                await self._unpin_it(other)
        else:
            await self._unpin_it(one)

    async def _unpin_it(self, one: Name) -> None:
        if await self._call("unpin", one, "POST", f"/v1/loras/{one.name}/unpin") == 200:
            one.is_pinned = False

    async def _unload(self, one: Name) -> None:
        query = "" if self._rng.random() < 0.5 else f"?timeout_s={self._rng.choice((0, 0.2, 2))}"
        await self._leave(one, "unload", "DELETE", f"/v1/loras/{one.name}{query}")

    async def _vllm_unload(self, one: Name) -> None:
        await self._leave(one, "vllm unload", "POST", "/v1/unload_lora_adapter", {"lora_name": one.name})

    async def _leave(self, one: Name, what: str, method: str, path: str, body: Any = None) -> None:
        claims, began = self._world.oracle.of(one.name), time.monotonic()
        was_pinned = one.is_pinned
        claims.open(Claim.UNLOADING, began)
        was_certain = one.is_certain
        if not one.is_blocked:
            self._world.may_be_resolved(one)
        one.is_certain = was_certain  # what the answer is judged by
        status = await self._call(what, one, method, path, body)
        one.is_certain = False
        if status != 200:
            one.is_pinned = was_pinned
        claims.close(Claim.UNLOADING, time.monotonic() + 1)
        if status == 200 and not one.is_blocked:
            kept = {self._world.told(one, v) for v, at in one.replaced.items() if time.monotonic() - at < _REMEMBERED_S}
            if one.current is not None:
                kept.add(self._world.told(one, one.current))
            for version in range(VERSIONS):
                if version not in kept or one.uri is not None:
                    claims.close(version, time.monotonic())

    async def _block(self, one: Name) -> None:
        claims, began = self._world.oracle.of(one.name), time.monotonic()
        for claim in (Claim.UNLOADING, Claim.ABSENT):
            claims.open(claim, began)
        path = f"/v1/loras/{one.name}?block=true&timeout_s=1"
        if await self._call("block", one, "DELETE", path) == 200:
            one.is_certain = one.is_held = one.is_pinned = False
            one.is_blocked = True
            for label in (*range(VERSIONS), Claim.UNLOADING, Claim.UNREGISTERED):
                claims.close(label, time.monotonic())
        else:
            # The answer is lost, or the disk is full, and the block may hold all the same: the name is unloaded then.
            one.is_certain, one.is_blocked = False, one.is_blocked or None
            one.is_held = one.is_pinned = False
            claims.close(Claim.UNLOADING, time.monotonic())

    # --- what was answered ---

    def _may_be_found(self, one: Name) -> None:
        """Before a load: a name that is not registered gets what its source has."""
        if one.is_certain:
            return
        claims = self._world.oracle.of(one.name)
        claims.open(Claim.UNREGISTERED, time.monotonic())
        if one.is_blocked:
            claims.open(Claim.ABSENT, time.monotonic())
        self._world.open_source_versions(one)

    async def look(self, one: Name) -> int | None:
        """Which version the server says that it serves; the oracle is told that it is this one from here on."""
        async with connect(self._target.url) as client:
            try:
                answer = await client.get(f"/v1/loras/{one.name}")
                view = answer.json()
            except httpx.HTTPError:
                return None
        if answer.status_code != 200 or view["state"] != "serving":
            self._journal.violation(
                "what was loaded is served", f"{answer.status_code} {view.get('state')}", model=one.name
            )
            return None
        version = self._version_at(one, Path(view["path"]))
        if version is None:
            return None
        if self._world.told(one, version) not in self._world.valid(one):
            text = f"version {version} is served where {sorted(self._world.valid(one))} may be"
            self._journal.violation("only valid versions are served", text, model=one.name)
        self._world.serves(one, version, may_change=not one.is_held)
        return version

    def _version_at(self, one: Name, directory: Path) -> int | None:
        """The version whose bytes lie in a directory of the store."""
        try:
            sha256 = hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()
        except OSError as error:
            now, claims = time.monotonic(), self._world.oracle.of(one.name)
            if Claim.GIVEN_WAY not in claims.during(now, now):
                self._journal.violation("what is served is in the store", str(error), model=one.name)
            return None
        adapter, version = self._world.bank.versions_by_sha256.get(sha256, (None, None))
        if adapter != one.adapter or version is None:
            text = f"the bytes of adapter {adapter}, version {version}"
            self._journal.violation("only valid versions are served", text, model=one.name)
            return None
        return version

    async def _call(self, what: str, one: Name, method: str, path: str, body: Any = None) -> int:
        """One call of the admin API; returns its status, 0 where the server was gone."""
        began = time.monotonic()
        state = {"certain": one.is_certain, "held": one.is_held, "blocked": one.is_blocked, "current": one.current}
        try:
            async with connect(self._target.url) as client:
                answer = await client.request(method, path, json=body)
            status, text = answer.status_code, "" if answer.status_code == 200 else answer.text[:300]
        except httpx.HTTPError as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        self._journal.write("operator", what, status, ended - began, model=one.name, error=text, **state)
        oracle = self._world.oracle
        if status == 200 or oracle.is_down(began, ended):
            return status
        if status not in self._refusals(what, one, began) and not self._is_explained(what, one, status, text, began):
            self._journal.violation("refusals are right", f"{what}: {status} {text}", model=one.name, **state)
        return status

    def _refusals(self, what: str, one: Name, began: float) -> set[int]:
        """The refusals that the state of the name allows."""
        allowed = set()
        if one.is_blocked is None:
            allowed.add(404)  # a block that could not be written holds in the server
        if what == "rollback" or (not one.is_certain and what not in ("load", "prefetch", "block")):
            allowed.add(404)  # there may be no version before; it may not be registered
        if what == "prefetch" and one.is_blocked is not False:
            allowed.add(404)  # only a load ends a block
        if what == "refresh" or (what in ("load", "prefetch") and not one.is_certain):
            remembered = what != "refresh" and began - one.appeared < ABSENT_TTL_S + FLIGHT_S
            if one.current is None or remembered:
                allowed.add(404)
        return allowed

    def _is_explained(self, what: str, one: Name, status: int, text: str, began: float) -> bool:
        """Whether a fault explains a refusal of an operation that asks a source, or writes to the store."""
        sources: tuple[str, ...] = ()
        if what == "refresh" or (what in ("load", "prefetch") and not one.is_certain):
            # All are asked where none has it.
            sources = ("s3", "hub") if one.current is None and one.uri is None else (one.place,)
            sources = (*sources, f"{one.place} uris") if one.uri else sources
        oracle, whom = self._world.oracle, (*map(of_source, sources), DISK, *([one.name] if sources else ()))
        cause = oracle.causes.explaining(whom, (status, code_of(text)), text, began, time.monotonic())
        if cause is None:
            return False
        oracle.explained[cause.what] += 1
        return True
