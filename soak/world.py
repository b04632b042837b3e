"""Two hundred names in four sources, and the changes that trainers make to them."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from soak.bank import ADAPTERS, VERSIONS, WEIGHTS, Bank
from soak.oracle import AFTER_S, Claim, Label, Oracle
from testbed.hub import Hub
from testbed.s3 import Bucket

SOURCES = ("filesystem", "s3", "hub", "uri")
# What the server may still remember of a source: LORA_PLUGINS_REVALIDATE_S and _ABSENT_TTL_S, see server.py.
REVALIDATE_S, ABSENT_TTL_S = 5.0, 2.0
# The longest that a look-up or fetch which began before a change may still end with what was there before it.
FLIGHT_S = 45.0


@dataclass(eq=False)
class Name:
    """One name, and what is so of it.

    Attributes:
        uri: where it must be loaded from; None where a source has it by its name.
        current: the version that the source has; None where it has none.
        replaced: versions that the source had, and until when.
        appeared: when the source had it again, after it had not.
        is_certain: registered for certain, so that no source is asked for it by a request.
        is_held: rolled back, so that the poller leaves it alone.
        is_blocked: unloaded and blocked, until it is loaded; None where the answer to that was lost.
        lock: held by whoever changes the name or its source.
    """

    adapter: int
    name: str
    source: str
    uri: str | None = None
    current: int | None = 0
    replaced: dict[int, float] = field(default_factory=dict)
    appeared: float = -math.inf
    is_certain: bool = False
    is_held: bool = False
    is_blocked: bool | None = False
    is_pinned: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def place(self) -> str:
        """The kind of storage that it lies in: what may fail for it."""
        if self.uri is None:
            return self.source
        return {"file": "filesystem", "s3": "s3", "hf": "hub"}[self.uri.partition("://")[0]]


class World:
    """The sources' contents, with every change reported to the oracle.

    Args:
        told: the version that the oracle hears of, by the one that is published; for controls.
    """

    def __init__(
        self, bank: Bank, home: Path, bucket: Bucket, hub: Hub, *, told: Callable[[int, int], int] = lambda a, v: v
    ) -> None:
        self.bank = bank
        self.root, self.allowed = home / "adapters", home / "allowed"
        self._aside = home / "aside"
        self._bucket = bucket
        self._hub = hub
        self._told = told
        self.names = [_name(adapter, self.allowed) for adapter in range(ADAPTERS)]
        self.by_name = {one.name: one for one in self.names}
        self.oracle = Oracle(bank, self.by_name)
        for one in self.names:
            # A name that only a URI leads to is looked for at S3 and the Hub until it is loaded.
            self.oracle.sources_of[one.name] = ("s3", "hub", f"{one.place} uris") if one.uri else (one.place,)
        self._numbers = itertools.count(1)  # drawn in threads: each is given once

    def fill(self) -> None:
        """Put the first version of everything where it belongs."""
        for directory in (self.root, self.allowed, self._aside):
            directory.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        for one in self.names:
            self._write(one, 0, random.Random(one.adapter))
            claims = self.oracle.of(one.name)
            claims.open(Claim.UNREGISTERED, now)
            claims.open(Claim.ABSENT if one.uri else self._told(one.adapter, 0), now)

    # --- what trainers do; the caller holds the name's lock ---

    async def publish(self, one: Name, version: int, rng: random.Random) -> None:
        """Put a version at the source, or back there."""
        claims, before = self.oracle.of(one.name), one.current
        is_at_once = one.uri is None or one.is_certain  # else nobody reads it until it is loaded
        if is_at_once and not one.is_held and not one.is_blocked:
            claims.open(self._told(one.adapter, version), time.monotonic())
        if one.place == "filesystem" and not one.is_certain and one.uri is None:
            claims.open(Claim.ABSENT, time.monotonic())  # between two renames
        await asyncio.to_thread(self._write, one, version, rng)
        now = time.monotonic()
        if before is None:
            one.appeared = now
        one.current = version
        one.replaced.pop(version, None)
        if before is not None and before != version:
            one.replaced[before] = now
        if one.uri is None and one.is_blocked is False:
            claims.close(Claim.ABSENT, now + ABSENT_TTL_S + FLIGHT_S)

    async def remove(self, one: Name) -> None:
        """Take an adapter from its source; what is registered goes on."""
        if not one.is_certain or Claim.GIVEN_WAY in self._claims(one):
            self.oracle.of(one.name).open(Claim.ABSENT, time.monotonic())
        await asyncio.to_thread(self._remove, one)
        if one.current is not None:
            one.replaced[one.current] = time.monotonic()
        one.current = None

    def may_give_way(self, one: Name) -> None:
        """The copy of what no request uses may leave a full disk now: the next request has to fetch it."""
        claims, now = self.oracle.of(one.name), time.monotonic()
        claims.open(Claim.GIVEN_WAY, now)
        self.oracle.gave_way_at = now + AFTER_S  # fetches that have met the fault may still make room
        if one.current is None:
            claims.open(Claim.ABSENT, now)

    # --- what the server is about to do, or has done, by an operator's call; the caller holds the name's lock ---

    def may_be_resolved(self, one: Name) -> None:
        """The name may leave the registry now, or is not in it: the next request, or load, asks the source."""
        claims, now = self.oracle.of(one.name), time.monotonic()
        claims.open(Claim.UNREGISTERED, now)
        one.is_certain = one.is_held = one.is_pinned = False
        if one.uri is not None or one.current is None:
            claims.open(Claim.ABSENT, now)
        if one.uri is None:
            self.open_source_versions(one)

    def open_source_versions(self, one: Name) -> None:
        """Whatever the source has now, or the server may remember of it, may be served."""
        claims, now = self.oracle.of(one.name), time.monotonic()
        for version, until in one.replaced.items():
            if now - until < REVALIDATE_S + FLIGHT_S:
                claims.open(self._told(one.adapter, version), now)
        if one.current is not None:
            claims.open(self._told(one.adapter, one.current), now)

    def serves(self, one: Name, version: int, *, may_change: bool) -> None:
        """The server has said that it serves this version now; with `may_change`, or what the source has meanwhile."""
        claims, now = self.oracle.of(one.name), time.monotonic()
        served: set[Label] = {self._told(one.adapter, version)}
        if may_change and one.current is not None:
            served.add(self._told(one.adapter, one.current))
        for label in served:
            claims.open(label, now)
        # A load of what is served looks at no copy: only a request that is answered shows that it is there.
        kept = served | {Claim.GIVEN_WAY}
        if one.current is None and Claim.GIVEN_WAY in self._claims(one):
            kept.add(Claim.ABSENT)  # the copy may leave, and no source has another
        for label in (*range(VERSIONS), *Claim):
            if label not in kept:
                claims.close(label, now)
        one.is_certain, one.is_blocked = True, False

    def valid(self, one: Name) -> set[int]:
        """The versions that may be served at this moment."""
        return {label for label in self._claims(one) if isinstance(label, int)}

    def _claims(self, one: Name) -> set[Label]:
        now = time.monotonic()
        return self.oracle.of(one.name).during(now, now)

    def told(self, one: Name, version: int) -> int:
        return self._told(one.adapter, version)

    # --- files ---

    def _write(self, one: Name, version: int, rng: random.Random) -> None:
        files = self.bank.files(one.adapter, version)
        if one.place == "s3":
            if one.current is None or not one.replaced:
                self._bucket.put_many(self._key(one), files)
            else:
                self._bucket.put(f"{self._key(one)}/{WEIGHTS}", files[WEIGHTS])
        elif one.place == "hub":
            self._hub.commit(self._repo(one), dict(files))
        else:
            self._write_directory(self._directory(one), files, is_by_file=rng.random() < 0.5)

    def _write_directory(self, target: Path, files: dict[str, bytes], *, is_by_file: bool) -> None:
        number = next(self._numbers)
        fresh = self._aside / f"fresh-{number}"
        fresh.mkdir()
        for file, data in files.items():
            (fresh / file).write_bytes(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            fresh.rename(target)
        elif is_by_file:  # the configuration is the same
            os.replace(fresh / WEIGHTS, target / WEIGHTS)
            shutil.rmtree(fresh)
        else:
            old = self._aside / f"old-{number}"
            target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old)

    def _remove(self, one: Name) -> None:
        if one.place == "s3":
            self._bucket.delete_prefix(f"{self._key(one)}/")
        elif one.place == "hub":
            self._hub.delete(self._repo(one))
        else:
            old = self._aside / f"old-{next(self._numbers)}"
            self._directory(one).rename(old)
            shutil.rmtree(old)

    def _directory(self, one: Name) -> Path:
        return (self.allowed if one.uri else self.root) / one.name

    @staticmethod
    def _key(one: Name) -> str:
        return f"{'uris' if one.uri else 'loras'}/{one.name}"

    @staticmethod
    def _repo(one: Name) -> str:
        return f"other/{one.name}" if one.uri else one.name


def _name(adapter: int, allowed: Path) -> Name:
    source = SOURCES[adapter % len(SOURCES)]
    number = adapter // len(SOURCES)
    if source == "filesystem":
        return Name(adapter, f"team-{number % 5}/f{number:03}" if number % 2 else f"f{number:03}", source)
    if source == "s3":
        return Name(adapter, f"s{number:03}", source)
    if source == "hub":
        return Name(adapter, f"acme/h{number:03}", source)
    name = f"u{number:03}"
    places = (f"{allowed.as_uri()}/{name}", f"s3://adapters/uris/{name}", f"hf://other/{name}")
    return Name(adapter, name, source, places[number % len(places)])
