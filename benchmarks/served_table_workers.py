"""The processes of `benchmarks/served_table.py`: each opens the trial's table, or follows today's leader.

    python -m benchmarks.served_table_workers WHAT FOLDER JOURNAL VFS NUMBER ROUNDS

Prints one JSON value as its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.served_table_rows import ChangedMeanwhile, Requests, Row, ServedTable, engine_ids

TABLE, NAME, MOST_SERVERS = "served.sqlite", "policy", 4
NAMES = ("sql", "chat", "code")
BETWEEN_S = 0.05  # changes of the process that changes rows beside those that look


def opened(folder: Path, journal: str, vfs: str, stamp: str = "mapped") -> tuple[ServedTable, Requests]:
    table = ServedTable(folder / TABLE, journal=journal, vfs=vfs, stamp=stamp)
    return table, Requests(table, lambda row: row, lambda request: request)


def operation(number: int) -> tuple[str, dict[str, Any]]:
    """The operation of this number, and so the fields that it leaves: load or swap, pin, block, load, unload."""
    name = NAMES[number // 5 % len(NAMES)]
    loaded = {"digest": f"digest-{number}", "engine_id": number + 1, "uri": f"uri-{number}", "is_blocked": 0}
    kinds = (
        loaded,
        {"is_pinned": 1, "is_fixed": 1},
        {"is_blocked": 1, "digest": None, "engine_id": None},
        {**loaded, "is_pinned": 0},
        {"digest": None, "engine_id": None, "uri": None},
    )
    return name, kinds[number % 5]


def after(operations: int) -> dict[str, Row]:
    """The rows after so many operations."""
    rows: dict[str, Row] = {}
    for number in range(operations):
        name, fields = operation(number)
        before = rows.get(name, Row(name))
        kept = {field: getattr(before, field) for field in Row.__slots__}
        rows[name] = Row(**{**kept, **fields, "times": before.times + 1, "number": number + 1})
    return rows


def operations(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> None:
    """Carry out operations one after the other, and say which are begun and which answered."""
    said = os.open(folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    table, _ = opened(folder, journal, vfs)
    for at in range(rounds):
        name, fields = operation(at)
        os.write(said, b"begun\n")
        table.change(name, **fields)
        os.write(said, b"answered\n")


def writers(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> list[Any]:
    """Change one name so many times, each time from what was just looked at; what was seen, and when."""
    table, requests = opened(folder, journal, vfs)
    ids, seen, done = engine_ids(number, MOST_SERVERS), list[Any](), 0
    while done < rounds:
        began = time.monotonic()
        row = requests.row(NAME)
        seen.append((began, time.monotonic(), row.times, 0))
        began, engine_id = time.monotonic(), next(ids)
        try:
            row = table.change(NAME, row.times, digest=f"{number}-{done}", engine_id=engine_id)
        except ChangedMeanwhile:
            continue
        seen.append((began, time.monotonic(), row.times, engine_id))
        done += 1
    return seen


def looks(folder: Path, journal: str, vfs: str, number: int, rounds: int, stamp: str = "mapped") -> list[Any]:
    """Microseconds of a look for a served name, the median of batches; and of those that found a change.

    `rounds` below 0 where nothing changes.
    """
    _, requests = opened(folder, journal, vfs, stamp)
    batches, found, name = [], list[float](), f"name-{number}"
    requests.get(name)
    for _ in range(abs(rounds)):
        began = time.perf_counter()
        for _ in range(1000):
            requests.get(name)
        batches.append((time.perf_counter() - began) * 1e3)
    while len(found) < rounds // 2:
        before, began = requests._number, time.perf_counter()
        requests.get(name)
        if requests._number != before:
            found.append((time.perf_counter() - began) * 1e6)
        time.sleep(0.001)
    return [sorted(batches)[len(batches) // 2], found]


def looks_by_data_version(*arguments: Any) -> list[float]:
    return looks(*arguments, stamp="data_version")


def changes(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> list[float]:
    """Milliseconds of durable changes of a name of its own, each made in a thread, as beside an event loop."""
    table, requests = opened(folder, journal, vfs)

    async def change(at: int) -> float:
        began = time.perf_counter()
        await asyncio.to_thread(table.change, f"name-{number}", digest=f"{at}", engine_id=at + 1)
        assert requests[f"name-{number}"].digest == f"{at}"
        return (time.perf_counter() - began) * 1e3

    async def all_of_them() -> list[float]:
        return [await change(at) for at in range(rounds)]

    return asyncio.run(all_of_them())


def changes_now_and_then(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> None:
    """Change a name every 50 ms, until the standard input ends."""
    table, _ = opened(folder, journal, vfs)
    os.set_blocking(0, False)
    while sys.stdin.buffer.raw.read(1) is None:  # type: ignore[attr-defined]
        table.change("other", digest=str(time.time()))
        time.sleep(BETWEEN_S)


def holds(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> None:
    """Begin a change, say so, and wait to be killed."""
    table, _ = opened(folder, journal, vfs)
    with table._transaction() as run:
        run("REPLACE INTO served VALUES ('half', 'x', 1, 'x', 0, 0, 0, 1, 1000000)")
        print("held", flush=True)
        time.sleep(60)


def fills(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> list[Any]:
    """Change and look at each line of the standard input: what came of both."""
    table, requests = opened(folder, journal, vfs)
    found = []
    for at, _ in enumerate(iter(sys.stdin.readline, "")):
        error = ""
        try:
            table.change(NAME, digest=f"{at}", engine_id=at + 1)
        except sqlite3.OperationalError as raised:
            error = str(raised)
        found.append([at, error, requests.row(NAME).digest])
        print("tried", flush=True)
    return found


# --- today's: the leader's table, told to followers on a socket ---


def follows(folder: Path, journal: str, vfs: str, number: int, rounds: int) -> dict[str, Any]:
    """Follow the leader of the folder; the first follower also carries calls, and measures both."""
    from lora_plugins.server.carrying import CarryToLeader
    from lora_plugins.server.follower import Follower

    async def nothing() -> None:
        """Where no lease ends."""

    async def follow() -> dict[str, Any]:
        follower = Follower(
            lambda name, adapter: adapter, lambda *_: None, lambda _: None, nothing, on_loss=lambda: None
        )
        await follower.connect(folder, number)
        if number != 1:
            with suppress(Exception):
                await follower._reading  # type: ignore[misc]
            return {}
        carry = CarryToLeader(None, lambda: follower, None)  # type: ignore[arg-type]
        took = [await _carried(carry) for _ in range(rounds)]
        began = time.perf_counter()
        for _ in range(100_000):
            follower.table.get("name-1")
        look_us = (time.perf_counter() - began) * 10
        return {"carried_ms": took, "look_us": look_us}

    return asyncio.run(follow())


async def _carried(carry: Any) -> float:
    """Milliseconds until an administrator's call, asked of a follower, is answered."""
    began, ended = time.perf_counter(), asyncio.Event()
    scope = {"type": "http", "method": "POST", "path": "/v1/loras", "headers": []}
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> Any:
        for message in messages:
            return message
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            ended.set()

    await carry(scope, receive, send)
    return (time.perf_counter() - began) * 1e3


WORKERS = {it.__name__: it for it in (operations, writers, looks, looks_by_data_version, changes,
                                      changes_now_and_then, holds, fills, follows)}  # fmt: skip

if __name__ == "__main__":
    what, where, journal_, vfs_, number_, rounds_ = sys.argv[1:]
    print(json.dumps(WORKERS[what](Path(where), journal_, vfs_, int(number_), int(rounds_))))
