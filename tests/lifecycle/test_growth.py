"""What a server remembers of names that come and go: nothing, or a bounded number.

Anybody can ask for a hundred thousand names, and a trainer pushes a name for each of its steps. After each of many such
names, no collection of ours has grown by an entry for each, except caches that drop the entries used longest ago.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cachetools import Cache

from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.observability.logs import LogEvents
from tests.lifecycle.test_faults import NEXT, SIZE_BYTES, SQL, Server
from tests.repetitions import times
from tests.virtual_time import run_in_virtual_time

NAMES = times(2_000, short=30)
WARM = 20  # names before the first count, which fill what has a small bound
LONGEST_S = 1e7


async def ask_while_down(server: Server, number: int) -> None:
    server.source.answers[f"down-{number}"] = SourceUnavailable("no answer")
    await server.lifecycle.load(f"down-{number}")


async def ask_broken(server: Server, number: int) -> None:
    server.source.answers[f"broken-{number}"] = {**SQL, "adapter_config.json": b"{}" + b" " * number}
    await server.lifecycle.load(f"broken-{number}")


async def load_and_unload(server: Server, number: int) -> None:
    server.source.answers[f"sql-{number}"] = SQL
    await server.lifecycle.load(f"sql-{number}")
    await server.lifecycle.unload(f"sql-{number}", block=False)


async def block_and_load(server: Server, number: int) -> None:
    server.source.answers[f"sql-{number}"] = SQL
    await server.lifecycle.load(f"sql-{number}")
    await server.lifecycle.unload(f"sql-{number}", block=True)
    await server.lifecycle.load(f"sql-{number}")
    await server.lifecycle.unload(f"sql-{number}", block=False)


async def push_and_unload(server: Server, number: int) -> None:
    await server.push(f"policy-{number}", NEXT)
    await server.lifecycle.unload(f"policy-{number}", block=False)


async def damage_and_unload(server: Server, number: int) -> None:
    """The copy is gone while no source answers."""
    name = f"sql-{number}"
    server.source.answers[name] = {**SQL, "adapter_config.json": SQL["adapter_config.json"] + b" " * number}
    await server.lifecycle.load(name)
    server.lifecycle.registry.require(name).is_damaged = True
    server.source.answers[name] = SourceUnavailable("no answer")
    await server.lifecycle.copies.look()
    await server.lifecycle.unload(name, block=False)


COMINGS: dict[str, Callable[[Server, int], Awaitable[object]]] = {
    "ask_unknown": lambda server, number: server.lifecycle.load(f"unknown-{number}"),
    "ask_revisions": lambda server, number: server.lifecycle.load(f"old@revision-{number}"),
    "ask_digests": lambda server, number: server.lifecycle.load_version(f"old@{number:064x}"),
    "pin_unknown": lambda server, number: server.lifecycle.pin(f"unknown-{number}"),
    "ask_while_down": ask_while_down,
    "ask_broken": ask_broken,
    "load_and_unload": load_and_unload,
    "block_and_load": block_and_load,
    "push_and_unload": push_and_unload,
    "damage_and_unload": damage_and_unload,
}


def collections_of(root: Any) -> Iterator[tuple[str, int]]:
    """Lengths of the collections below an object of ours, by path; not of caches with a bound, nor of test doubles."""
    seen, open_ = set[int](), deque[tuple[str, Any]]([("", root)])
    while open_:
        path, it = open_.popleft()
        if id(it) in seen or isinstance(it, (str, bytes, Cache)):
            continue
        seen.add(id(it))
        if isinstance(it, (dict, set, list, deque)):
            yield path, len(it)
            some = itertools.islice(it.values() if isinstance(it, dict) else it, 5)
            open_.extend((f"{path}[]", one) for one in some)
        elif type(it).__module__.startswith("lora_plugins"):
            names = [*getattr(it, "__dict__", ()), *getattr(type(it), "__slots__", ())]
            open_.extend((f"{path}.{name}", getattr(it, name, None)) for name in names)


@pytest.mark.parametrize("how", COMINGS)
def test_names_that_come_and_go_leave_nothing(tmp_path: Path, how: str) -> None:
    async def counted(server: Server, numbers: range) -> dict[str, int]:
        for number in numbers:
            with suppress(LoRAPluginsError):
                await COMINGS[how](server, number)
            server.source.answers = {"sql": SQL, "old": SQL}
        return {
            f"{type(root).__name__}{path}": length
            for root in (server.lifecycle, server.resolver, server.pushes, server.reconciler, server.logs)
            for path, length in collections_of(root)
        }

    async def trial() -> dict[str, int]:
        server = Server(tmp_path / "store", max_bytes=10 * SIZE_BYTES)  # damaged copies stay until room is needed
        server.logs = LogEvents()
        server.lifecycle.server.events.add(server.logs)
        server.source.answers["old"] = SQL
        await server.reconciler.start()
        await server.load("old")
        before = await counted(server, range(WARM))
        after = await counted(server, range(WARM, WARM + NAMES))
        return {path: length - before.get(path, 0) for path, length in after.items()}

    growth = run_in_virtual_time(trial(), longest_s=LONGEST_S)
    assert {path: more for path, more in growth.items() if more > NAMES // 3} == {}
