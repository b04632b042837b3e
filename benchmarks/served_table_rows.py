"""The trial's table: what several API servers would share in the place of a leader. `served_table.py` measures.

Every API server opens the table, reads rows through `Requests` as vLLM reads `lora_requests`, and changes rows under
the name's lock. A change is durable when `change` returns. A name that is served no longer keeps its row, without a
digest, so that others read what changed since their last look.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lora_plugins.server.registry import DesiredAdapter

FIELDS = ("name", "digest", "engine_id", "uri", "is_fixed", "is_pinned", "is_blocked", "times", "number")
SCHEMA = """
CREATE TABLE IF NOT EXISTS served (
    name TEXT PRIMARY KEY, digest TEXT, engine_id INTEGER, uri TEXT,
    is_fixed INTEGER NOT NULL, is_pinned INTEGER NOT NULL, is_blocked INTEGER NOT NULL,
    times INTEGER NOT NULL, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS by_number ON served (number);
"""
_BUSY_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """What is served under a name.

    Attributes:
        digest, engine_id: None where the name is not served.
        is_fixed: no refresh swaps the name to another version.
        times: how often the name has changed.
        number: of the table's change that made this row; later changes have larger numbers.
    """

    name: str
    digest: str | None = None
    engine_id: int | None = None
    uri: str | None = None
    is_fixed: int = 0
    is_pinned: int = 0
    is_blocked: int = 0
    times: int = 0
    number: int = 0


class ChangedMeanwhile(Exception):
    """The name has changed since the caller read its row."""


class MappedStamp:
    """Eight bytes mapped into every process: random, and others after each commit.

    Random, because a number written a second time would hide a change from a process that saw the first.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(file).st_size < 8:  # bytes, not a hole: a full disk must not kill who writes into the mapping
            os.pwrite(file, os.urandom(8), 0)
        self._bytes = memoryview(mmap.mmap(file, 8)).cast("Q")
        os.close(file)

    def read(self) -> int:
        return self._bytes[0]

    def renew(self) -> None:
        self._bytes[0] = struct.unpack("Q", os.urandom(8))[0]  # one store of eight bytes that lie together


class DataVersion:
    """SQLite's own: `PRAGMA data_version` differs after another connection's commit."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def read(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def renew(self) -> None:
        """SQLite's commit has renewed it."""


class ServedTable:
    """The table on disk; a connection to read, for the event loop, and one to change, for a thread.

    Args:
        journal: "wal"; "delete" where processes share no memory, as on a network file system.
        vfs: SQLite's layer for files and locks, "unix" or "unix-dotfile".
    """

    def __init__(self, path: Path, *, journal: str = "wal", vfs: str = "unix", stamp: str = "mapped") -> None:
        self._reading, self._changing = (self._open(path, journal, vfs) for _ in range(2))
        self._guard = threading.Lock()  # of this process's threads: SQLite's locks are of connections
        self.stamp = DataVersion(self._reading) if stamp == "data_version" else MappedStamp(Path(f"{path}-stamp"))

    @staticmethod
    def _open(path: Path, journal: str, vfs: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{path}?vfs={vfs}", uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        has: str = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
        if has != journal:
            raise sqlite3.NotSupportedError(f"{has} in the place of {journal}")
        connection.execute("PRAGMA synchronous=FULL")  # every commit is on disk before it returns
        connection.executescript(SCHEMA)
        return connection

    def since(self, number: int) -> list[Row]:
        """The rows that changed after the change `number`."""
        found = self._reading.execute("SELECT * FROM served WHERE number > ? ORDER BY number", (number,))
        return [Row(*row) for row in found.fetchall()]

    def change(self, name: str, times: int | None = None, /, **fields: Any) -> Row:
        """Change a name's fields in one durable transaction, if it still has changed `times` times.

        Raises:
            ChangedMeanwhile: another process was first. sqlite3.OperationalError: nothing has changed.
        """
        with self._transaction() as run:
            found = run("SELECT * FROM served WHERE name = ?", (name,)).fetchone()
            before = Row(name) if found is None else Row(*found)
            if times is not None and before.times != times:
                raise ChangedMeanwhile(name)
            last = run("SELECT coalesce(max(number), 0) FROM served").fetchone()[0]
            kept = {field: getattr(before, field) for field in FIELDS}
            row = Row(**{**kept, **fields, "times": before.times + 1, "number": last + 1})
            run(f"REPLACE INTO served VALUES ({', '.join('?' * len(FIELDS))})", [getattr(row, it) for it in FIELDS])
        return row

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        with self._guard:
            self._changing.execute("BEGIN IMMEDIATE")
            try:
                yield self._changing.execute
                self._changing.execute("COMMIT")
            except BaseException:
                if self._changing.in_transaction:
                    self._changing.execute("ROLLBACK")
                raise
            finally:
                self.stamp.renew()  # also after a failure: what was read inside, others must see too

    def migrate(self, served: Iterable[DesiredAdapter], blocked: Iterable[str]) -> None:
        """Fill an empty table from the list and the blocks of the release before, in one transaction."""
        with self._transaction() as run:
            number = count(1)
            if run("SELECT 1 FROM served").fetchone():
                return
            rows = {it.name: Row(it.name, it.held_digest or it.last_digest, None, it.uri, it.held_digest is not None,
                                 it.is_pinned, times=1, number=next(number)) for it in served}  # fmt: skip
            rows |= {name: Row(name, is_blocked=1, times=1, number=next(number)) for name in blocked}
            for row in rows.values():
                run(f"INSERT INTO served VALUES ({', '.join('?' * len(FIELDS))})", [getattr(row, it) for it in FIELDS])


class Requests(MutableMapping[str, Any]):
    """The table as vLLM's `lora_requests`; a row that has not changed gives the same request object.

    Args:
        request_of: makes vLLM's request of a row.
        row_of: the fields of a row for a request that vLLM's own code puts in.
    """

    def __init__(
        self, table: ServedTable, request_of: Callable[[Row], Any], row_of: Callable[[Any], dict[str, Any]]
    ) -> None:
        self._table, self._request_of, self._row_of = table, request_of, row_of
        self._requests: dict[str, Any] = {}
        self._rows: dict[str, Row] = {}
        self._seen, self._number = -1, 0

    def _now(self) -> dict[str, Any]:
        stamp = self._table.stamp.read()  # before the rows: a change in between is read at the next look
        if stamp != self._seen:
            for row in self._table.since(self._number):
                self._rows[row.name], self._number = row, row.number
                if row.engine_id is None or row.is_blocked:
                    self._requests.pop(row.name, None)
                else:
                    self._requests[row.name] = self._request_of(row)
            self._seen = stamp
        return self._requests

    def row(self, name: str) -> Row:
        """The row of a name, served or not."""
        self._now()
        return self._rows.get(name) or Row(name)

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._now().get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __setitem__(self, name: str, request: Any) -> None:
        self._changed(self._table.change(name, **self._row_of(request)))

    def __delitem__(self, name: str) -> None:
        if name not in self._now():
            raise KeyError(name)
        self._changed(self._table.change(name, digest=None, engine_id=None))

    def _changed(self, row: Row) -> None:
        self._seen = -1  # `data_version` does not show a connection its own process's commits in every mode
        self._now()


def engine_ids(index: int, servers: int) -> Iterator[int]:
    """The engine ids of one API server: no two servers have one in common, and none is 0."""
    return count(index + servers, servers)


class Election:
    """Who polls sources: the process that has the lock; the system releases the lock of a dead process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def is_won(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def name_lock(folder: Path, name: str) -> Iterator[None]:
    """Inside, no other process changes the name; for a thread. 1024 files, so names may share a lock."""
    part = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big") % 1024
    file = os.open(folder / f"{part}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
