"""A trial: the served set of several API servers as a SQLite table, beside today's leader: `make bench-served-table`.

    python -m benchmarks.served_table --case kills --case writers

- looks: what a look for a served name costs, by a mapped stamp and by `PRAGMA data_version`, in one process and four,
  while nothing changes and while a process changes rows.
- changes: a durable change, in one process and in four at once.
- today: a change asked of a follower, carried to the leader, told to three followers and written to the list, without
  HTTP and engines; by the product's own code.
- writers: two and four processes change one name, each from what was last seen: lost updates, and impossible orders.
- kills: a process is killed at each of its writes, syncs, cuts and removals of files, and beside it others go on: rows
  that are half, and answered changes that are gone.
- locks: what journals and layers for locks do where processes share no memory, as on a network file system.
- full: a full disk.
- lines: what would go, and what would come.
- first, where asked for: vLLM alone, whose first API server is killed; and vLLM told that it ended with exit code 0.

Keeps benchmarks/results/served_table.json, or served_table_first.json and the like of some cases; returns 1 where a
count that must be 0 is not.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.fault_injection import Interposer
from benchmarks.record import ROOT, keep
from benchmarks.served_table_lines import account
from benchmarks.served_table_rows import FIELDS, Election, ServedTable
from benchmarks.served_table_workers import MOST_SERVERS, NAME, NAMES, TABLE, after, opened

SERVED, PAUSE_S, STUCK_S = 1000, 0.02, 3.0
JOURNALS = (("wal", "unix"), ("delete", "unix"))
WITHOUT_MEMORY = (("wal", "unix-none"), ("wal", "unix-dotfile"), ("delete", "unix-dotfile"))
WRITES = 4  # of interposer.c: files that are there can be opened on a full disk
UPDATED = ("lost", "in no order", "engine ids given twice")


# --- processes ---


def begun(what: str, folder: Path, journal: str = "wal", vfs: str = "unix", number: int = 0, rounds: int = 1,
          **env: str) -> subprocess.Popen[str]:  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.served_table_workers", what, str(folder), journal, vfs]
    return subprocess.Popen(
        [*command, str(number), str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def said(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate()
    assert process.returncode == 0, process.returncode
    return json.loads(out.splitlines()[-1])


@contextlib.contextmanager
def changing(folder: Path, journal: str) -> Iterator[None]:
    """Inside, a process changes a row every 50 ms."""
    process = begun("changes_now_and_then", folder, journal)
    try:
        yield
    finally:
        said(process)


def several(what: str, count: int, *arguments: Any, rounds: int) -> list[Any]:
    """What `count` processes say that run at once."""
    processes = [begun(what, *arguments, number=number, rounds=rounds) for number in range(count)]
    return [said(process) for process in processes]


def filled(folder: Path, journal: str, names: int = SERVED) -> Path:
    """A folder with a table that serves so many names."""
    folder.mkdir(parents=True)
    table = ServedTable(folder / TABLE, journal=journal)
    with table._transaction() as run:
        for at in range(names):
            row = (f"name-{at}", "0" * 64, at + 1, f"s3://bucket/{at}", 0, 0, 0, 1, at + 1)
            run(f"INSERT INTO served VALUES ({', '.join('?' * len(FIELDS))})", row)
    return folder


def spread(values_ms: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": round(median(values_ms), 2), "p95_ms": round(quantiles(values_ms, n=20)[-1], 2)}


# --- costs ---


def looks(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for (journal, _), what, count, changes in itertools.product(
        JOURNALS, ("looks", "looks_by_data_version"), (1, MOST_SERVERS), (False, True)
    ):
        folder = filled(home / f"{journal}-{what}-{count}-{changes}", journal)
        with changing(folder, journal) if changes else contextlib.nullcontext():
            found = several(what, count, folder, journal, rounds=options.rounds if changes else -options.rounds)
        rows.append({"journal": journal, "by": "data_version" if "by" in what else "mapped", "processes": count,
                     "changes": changes, "look_us": round(median(it[0] for it in found), 2)})  # fmt: skip
        if changes:
            rows[-1]["look_after_a_change_us"] = round(median(it for one in found for it in one[1]))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def changes(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for (journal, _), count in itertools.product(JOURNALS, (1, MOST_SERVERS)):
        folder = filled(home / f"{journal}-{count}", journal)
        found = several("changes", count, folder, journal, rounds=options.rounds)
        rows.append({"journal": journal, "processes": count, **spread([it for one in found for it in one])})
        print(json.dumps(rows[-1]), flush=True)
    return [*rows, {"journal": "one fdatasync of 4 KiB", **spread([_synced(home) for _ in range(options.rounds)])}]


def _synced(home: Path) -> float:
    file = os.open(home / "synced", os.O_WRONLY | os.O_CREAT)
    began = time.perf_counter()
    os.pwrite(file, b"x" * 4096, 0)
    os.fdatasync(file)
    os.close(file)
    return (time.perf_counter() - began) * 1e3


def today(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A leader here, followers in three processes; the first follower asks."""
    import asyncio

    from lora_plugins.server.carrying import CarryToLeader, answer_carried
    from lora_plugins.server.leader import Leader
    from lora_plugins.server.registry import DesiredAdapter
    from lora_plugins.server.served_file import ServedFile

    leader = Leader(lambda request: request, lambda number: None)
    served = ServedFile.of_store(home, "base", "replica")
    served.path.parent.mkdir(parents=True)
    digests, told, written = {f"name-{at}": "0" * 64 for at in range(SERVED)}, [], []

    def frame(name: str) -> dict[str, Any]:
        return {"engine_id": 1, "path": digests[name], "base": "base", "is_3d": False, "warnings": []}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        digests["name-1"] = f"{len(told):064}"
        began = time.perf_counter()
        leader.table["name-1"] = frame("name-1")
        await leader.all_have()
        told.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        listed = [DesiredAdapter(name, f"s3://bucket/{name}", last_digest=it) for name, it in digests.items()]
        await asyncio.to_thread(served.write, listed)
        written.append((time.perf_counter() - began) * 1e3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def lead() -> dict[str, Any]:
        async def call(*_: Any) -> dict[str, Any]:
            return {}

        for name in digests:
            leader.table[name] = frame(name)
        carrying = CarryToLeader(application, lambda: leader, None)  # type: ignore[arg-type]
        await leader.listen(home, call, lambda *streams: answer_carried(carrying, *streams))
        followers = [begun("follows", home, number=number, rounds=options.rounds) for number in (1, 2, 3)]
        while len(leader._followers) < len(followers):
            await asyncio.sleep(0.05)
        found = await asyncio.to_thread(said, followers[0])
        leader.close()
        for follower in followers[1:]:
            await asyncio.to_thread(said, follower)
        return dict(found)

    found = asyncio.run(lead())
    return {"carried": spread(found["carried_ms"]), "told": spread(told), "list_written": spread(written),
            "look_us": round(found["look_us"], 2)}  # fmt: skip


# --- writers ---


Seen = Sequence[Any]  # began, ended, value, engine id of a change or 0 of a look


def judged(seen: Iterable[Seen], last: int) -> dict[str, int]:
    """Count updates that are lost, operations that no order of a counter explains, and engine ids given twice.

    A change makes the value that it returns. In an order of all operations by their values, each change before the
    looks that saw its value, none may have ended before an earlier one began.
    """
    operations = list(seen)
    made = Counter(value for _, _, value, engine_id in operations if engine_id)
    ids = Counter(engine_id for *_, engine_id in operations if engine_id)
    wrong, latest_began = 0, -1.0
    by_value = sorted(operations, key=lambda it: it[2])
    for _, same in itertools.groupby(by_value, key=lambda it: it[2]):
        group = list(same)
        began = [it[0] for it in group if it[3]]  # of the change that made the value
        latest_began = max([latest_began, *began])
        wrong += sum(it[1] < latest_began for it in group)
        latest_began = max([latest_began, *(it[0] for it in group)])
    return {
        "changes": sum(made.values()),
        "looks": len(operations) - sum(made.values()),
        "lost": max(sum(made.values()) - last, sum(count - 1 for count in made.values())),
        "in no order": wrong,
        "engine ids given twice": sum(count - 1 for count in ids.values()),
    }


def writers(home: Path, options: argparse.Namespace, kinds: Sequence[tuple[str, str]] = JOURNALS) -> list[Any]:
    rows = []
    for (journal, vfs), count in itertools.product(kinds, (2, MOST_SERVERS)):
        folder = home / f"{journal}-{vfs}-{count}"
        folder.mkdir(parents=True)
        opened(folder, journal, vfs)
        found = several("writers", count, folder, journal, vfs, rounds=options.rounds)
        _, requests = opened(folder, journal, vfs)
        rows.append({"journal": journal, "vfs": vfs, "processes": count,
                     **judged(itertools.chain(*found), requests.row(NAME).times)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


# --- kills ---


def kills(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill a process at its first call, at its second, until it ends by itself; alone, and beside another process."""
    (home / "lib").mkdir(parents=True)
    interposer = Interposer(home / "lib", [home])
    rows = []
    for (journal, vfs), is_beside in itertools.product(JOURNALS, (False, True)):
        found, at = Counter[str](), 1
        folder = home / f"{journal}-{is_beside}"
        while _killed(folder / str(at), journal, vfs, interposer, at, options.operations, found, is_beside=is_beside):
            at += options.kill_step
        rows.append({"journal": journal, "beside another": is_beside, **found})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _killed(home: Path, journal: str, vfs: str, interposer: Interposer, at: int, rounds: int, found: Counter[str],
            *, is_beside: bool) -> bool:  # fmt: skip
    """Kill at the call `at`; count what is wrong afterwards. False where the process had fewer calls."""
    folder = home / "table"
    folder.mkdir(parents=True)
    neighbour = opened(folder, journal, vfs) if is_beside else None
    if neighbour:
        assert not neighbour[1]  # it has looked, so later it sees only what the stamp shows
    env = {**interposer.env, "INTERPOSER_UNDER": str(folder), "INTERPOSER_KILL_AT": str(at)}
    process = begun("operations", folder, journal, vfs, rounds=rounds, **env)
    process.communicate()
    if process.returncode == 0:
        return False
    path = home / "said"
    answered = path.read_text().count("answered") if path.exists() else 0
    allowed = [after(answered), after(answered + 1)]  # the change that had begun may be there, whole
    began = time.monotonic()
    found["kills"] += 1
    tables = [opened(folder, journal, vfs), *([neighbour] if neighbour else [])]
    for table, requests in tables:
        rows = {row.name: row for row in table.since(0)}
        if rows not in allowed:
            is_older = any(rows == after(before) for before in range(answered))
            found["answered and forgotten" if is_older else "half"] += 1
        looked = {name: requests.row(name) for name in NAMES if name in allowed[1]}
        found["not seen by a look"] += {name: row for name, row in looked.items() if row.times} not in allowed
        found["damaged"] += table._reading.execute("PRAGMA integrity_check").fetchone()[0] != "ok"
    for number, (table, _) in enumerate(tables):
        table.change("next", digest="x", engine_id=number + 1)
    found["others wait"] += time.monotonic() - began > STUCK_S
    return True


# --- locks and full disks ---


def locks(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What can be had of each journal and layer for locks."""
    rows: list[dict[str, Any]] = []
    for journal, vfs in (*JOURNALS, *WITHOUT_MEMORY):
        folder = home / f"{journal}-{vfs}"
        folder.mkdir(parents=True)
        row: dict[str, Any] = {"journal": journal, "vfs": vfs, "opens": "yes"}
        rows.append(row)
        try:
            table, _ = opened(folder, journal, vfs)
        except sqlite3.Error as error:
            row["opens"] = str(error)
            continue
        if vfs != "unix":
            row["writers"] = writers(home / f"writers-{journal}-{vfs}", options, [(journal, vfs)])
        holder = begun("holds", folder, journal, vfs)
        assert holder.stdout is not None
        holder.stdout.readline()
        row["look beside a change"] = _tried(table, table.since, 0)
        holder.kill()
        holder.communicate()
        row["change after a kill"] = _tried(table, table.change, NAME)
    rows.append(_exclusive(home))
    return rows


def _tried(table: ServedTable, act: Callable[..., object], argument: object) -> str:
    """Whether something can be done, or how it fails after a while."""
    for connection in (table._reading, table._changing):
        connection.execute(f"PRAGMA busy_timeout={int(STUCK_S * 1000)}")
    began = time.monotonic()
    try:
        act(argument)
    except sqlite3.OperationalError as error:
        return f"{error}, after {time.monotonic() - began:.0f} s"
    return "yes"


def _exclusive(home: Path) -> dict[str, Any]:
    """A write-ahead log without shared memory: one connection has the whole file."""
    first, second = (sqlite3.connect(home / "exclusive", timeout=0.5, isolation_level=None) for _ in range(2))
    first.execute("PRAGMA locking_mode=EXCLUSIVE")
    first.execute("PRAGMA journal_mode=wal")
    first.execute("CREATE TABLE served (name TEXT)")
    try:
        opens = f"yes: {second.execute('SELECT count(*) FROM served').fetchone()}"
    except sqlite3.OperationalError as error:
        opens = f"a second process: {error}"
    return {"journal": "wal", "vfs": "locking_mode=EXCLUSIVE", "opens": opens}


def full(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for journal, vfs in JOURNALS:
        folder, under = home / journal, home / journal / "table"
        under.mkdir(parents=True)
        interposer = Interposer(folder, [under])
        process = begun("fills", under, journal, vfs, **interposer.env)
        assert process.stdin is not None
        assert process.stdout is not None

        def tries(process: subprocess.Popen[str] = process) -> None:
            process.stdin.write("try\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            process.stdout.readline()  # type: ignore[union-attr]

        tries()
        with interposer.failing(errno.ENOSPC, 1000, WRITES):
            tries()
            late = begun("looks", under, journal, vfs, rounds=1, **interposer.env)
            late.communicate()
        tries()
        before, meanwhile, later = said(process)
        rows.append({"journal": journal, "error": meanwhile[1], "opens meanwhile": late.returncode == 0,
                     "half": int(meanwhile[2] != before[2]), "change afterwards": later[1] or "yes"})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def elected(home: Path, options: argparse.Namespace) -> dict[str, int]:
    """How many of two would poll, before and after the death of the first."""
    home.mkdir(parents=True)
    first, second = Election(home / "polls.lock"), Election(home / "polls.lock")
    both = int(first.is_won()) + int(second.is_won())
    os.close(first._file)
    return {"at once": both, "after a death": int(second.is_won())}


def first(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.served_table_first import without_the_first
    from testbed.bed import prepare

    base = prepare().base
    rows = [
        without_the_first(base, home, engines, is_told=told) for engines, told in ((1, False), (1, True), (2, True))
    ]
    print(json.dumps(rows), flush=True)
    return rows


def lines(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    return account()


# --- what was aimed at ---


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    goals: list[tuple[str, str, float, bool]] = []
    if measured := found.get("looks"):
        quiet = {
            (it["journal"], it["by"]): it["look_us"] for it in measured if it["processes"] == 1 and not it["changes"]
        }
        goals += [(f"a look, {journal}, {by}, µs", "5", value, value <= 5) for (journal, by), value in quiet.items()]
    if (changed := found.get("changes")) and (carried := found.get("today")):
        most = round(carried["carried"]["p50_ms"] + 2, 2)
        for row in changed[: 2 * len(JOURNALS)]:
            what = f"a change, {row['journal']}, {row['processes']} processes, ms"
            goals.append((what, f"{most} (today's + 2)", row["p50_ms"], row["p50_ms"] <= most))
    for row in found.get("writers", []):
        for count in UPDATED:
            goals.append((f"{row['processes']} writers, {row['journal']}: {count}", "0", row[count], row[count] == 0))
    for row in found.get("kills", []):
        for count in ("half", "answered and forgotten", "not seen by a look", "damaged", "others wait"):
            value = row.get(count, 0)
            beside = ", beside another" if row["beside another"] else ""
            goals.append((f"kills, {row['journal']}{beside}: {count}", "0", value, value == 0))
    for row in found.get("full", []):
        goals.append((f"full disk, {row['journal']}: half", "0", row["half"], row["half"] == 0))
    if counted := found.get("lines"):
        goals.append(("lines", "-800", counted["net"], counted["net"] <= -800))
    return [dict(zip(("what", "goal", "value", "met"), goal, strict=True)) for goal in goals]


CASES = {"looks": looks, "changes": changes, "today": today, "writers": writers, "kills": kills, "locks": locks,
         "full": full, "elected": elected, "lines": lines, "first": first}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--operations", type=int, default=8, help="of a process that is killed")
    parser.add_argument("--kill-step", type=int, default=1, help="calls between two kills")
    parser.add_argument("--folder", type=Path, help="for the result")
    options = parser.parse_args(arguments)
    load_before, found = os.getloadavg()[0], dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="bench-served-table-") as home:
        for case in options.case or [it for it in CASES if it != "first"]:
            folder = Path(home) / case
            folder.mkdir() if case in ("today", "changes", "full", "locks", "first") else None
            found[case] = CASES[case](folder, options)
    goals = goals_of(found)
    for goal in goals:
        print(f"{goal['what']}: {goal['value']}, goal {goal['goal']}{'' if goal['met'] else ': missed'}")
    more = {} if options.folder is None else {"folder": options.folder}
    kept_options = {name: value for name, value in vars(options).items() if name != "folder"}
    versions = {"sqlite": sqlite3.sqlite_version}
    name = "_".join(["served_table", *(options.case or [])])
    print(keep(name, found, goals=goals, options=kept_options, load_before=load_before, **versions, **more))
    return int(not all(goal["met"] for goal in goals if goal["goal"] == "0"))


if __name__ == "__main__":
    sys.exit(main())
