"""What happens to the store: its disk fills, another process works on it, bits of it change while no server runs."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.faults.injection import ENOSPC_CALLS, Interposer
from lora_plugins.cli import Exit
from soak.bank import WEIGHTS
from soak.journal import Journal
from soak.oracle import AFTER_S, DISK, DISK_IS_FULL, Cause
from soak.world import World

_MOST_S = 4.0
_MOST_DAMAGED = 12
LONGEST_COMMAND_S = 120.0
_COMMAND = "from lora_plugins.cli import main; main()"


def interposer(home: Path, store: Path) -> Interposer | None:
    """What lets writes into the store fail; None on a machine that cannot compile it."""
    return Interposer(home, [store]) if shutil.which("gcc") else None


class FullDisk:
    """The disk of the store fills now and then, for a few seconds."""

    def __init__(self, seed: int, disk: Interposer | None, world: World, journal: Journal) -> None:
        self._rng = random.Random(f"{seed}-disk")
        self._disk, self._world, self._journal = disk, world, journal
        self.idle = asyncio.Lock()  # held while it is full, and by whoever wants it not to be

    async def run(self, done: asyncio.Event, pause_s: float) -> None:
        while self._disk is not None and not done.is_set():
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            lasts_s, per_1000 = _MOST_S * self._rng.random(), self._rng.choice((300, 1000))
            async with self.idle:
                if done.is_set():
                    return
                await self._fill(self._disk, lasts_s, per_1000)

    async def fill(self, lasts_s: float) -> None:
        """Let every write fail for a time."""
        if self._disk is not None:
            async with self.idle:
                await self._fill(self._disk, lasts_s, 1000)

    async def _fill(self, disk: Interposer, lasts_s: float, per_1000: int) -> None:
        """Let so many of 1,000 writes fail for a time. The caller holds `idle`."""
        self._journal.write("fault", "disk full", "store", lasts_s, per_1000=per_1000)
        if per_1000 < 1000:  # where no write is done, nothing shows that a removal would help: all stays
            self._may_give_way()
        full = self._world.oracle.causes.add(Cause("disk full", DISK, time.monotonic(), refusals=DISK_IS_FULL))
        with disk.failing(errno.ENOSPC, per_1000, ENOSPC_CALLS):
            await asyncio.sleep(lasts_s)
        full.ended = time.monotonic() + AFTER_S
        if per_1000 < 1000:
            self._may_give_way()

    def _may_give_way(self) -> None:
        for one in self._world.names:
            self._world.may_give_way(one)


class Neighbour:
    """A second process on the same store: fetches adapters, and removes what nobody uses."""

    def __init__(self, seed: int, env: Mapping[str, str], most_bytes: int, world: World, journal: Journal) -> None:
        self._rng = random.Random(f"{seed}-neighbour")
        self._env = {**os.environ, **env}
        self._most_bytes = most_bytes
        self._world, self._journal = world, journal
        self.idle = (
            asyncio.Lock()
        )  # held while it works, and by whoever wants it to rest: a server's leases end with it

    async def run(self, done: asyncio.Event, pause_s: float) -> None:
        while not done.is_set():
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            if self._rng.random() < 0.5:
                async with self.idle:
                    await self.collect()
                continue
            one = self._rng.choice([one for one in self._world.names if one.uri is None])
            async with one.lock, self.idle:
                if one.current is not None and not one.is_blocked:
                    await self._call("pull", one.name)

    async def collect(self) -> None:
        """Remove what no server has served, also while there is none. The caller holds `idle`."""
        await self._call("gc", "--max-bytes", str(int(self._most_bytes * self._rng.random())))

    async def _call(self, *arguments: str) -> None:
        began = time.monotonic()
        command = [sys.executable, "-c", _COMMAND, *arguments, "--quiet"]
        process = await asyncio.create_subprocess_exec(
            *command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), LONGEST_COMMAND_S)
        except TimeoutError:
            process.kill()
            output, _ = await process.communicate()
            self._journal.violation("nothing waits for ever", f"{arguments} took {LONGEST_COMMAND_S:.0f} s")
        code = process.returncode or 0
        self._journal.write("neighbour", arguments[0], code, time.monotonic() - began)
        is_full_of_leases = arguments[0] == "gc" and code == Exit.NO_ROOM
        if code != 0 and not is_full_of_leases:
            text = f"{arguments} ended with {code}: {output.decode(errors='replace')[-300:]}"
            self._journal.violation("another process may work on the store", text)


def damage(store: Path, world: World, rng: random.Random) -> list[str]:
    """Flip a bit in the stored weights of some names whose source has the same bytes; for a time without a server.

    Returns their names.
    """
    found = []
    digests = {whose: digest for digest, whose in world.bank.versions_by_digest.items()}
    for one in rng.sample(world.names, len(world.names)):
        if len(found) == _MOST_DAMAGED or one.current is None or one.is_held:
            continue
        path = store / digests[one.adapter, one.current] / WEIGHTS
        if path.is_file():
            times, data = path.stat(), bytearray(path.read_bytes())
            data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
            path.chmod(0o600)
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            path.chmod(0o444)
            found.append(one.name)
    return found
