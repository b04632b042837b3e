"""Every invariant of the soak fails where it is broken, and holds where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from soak.clients import Target
from soak.invariants import (
    LONGEST_DRAIN_S,
    MORE_FILES,
    MORE_THREADS,
    MOST_IN_SLOTS,
    Monitor,
    check_counts,
    check_log,
)
from soak.journal import Journal
from soak.oracle import Claim, Windows
from soak.server import HOST_ADAPTERS, HOST_MAX_BYTES, Sample


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "events.jsonl", prints=False)
    yield made
    made.close()


def broken(journal: Journal) -> list[str]:
    return [found["invariant"] for found in journal.violations]


def views(count: int, tier: str, state: str = "serving") -> list[dict[str, object]]:
    return [{"lora_name": f"n{i}", "digest": f"d{i}", "tiers": [tier], "state": state} for i in range(count)]


@pytest.mark.parametrize(("tier", "most"), [("slot", MOST_IN_SLOTS), ("host", HOST_ADAPTERS)])
def test_more_adapters_than_fit_are_seen(journal: Journal, tier: str, most: int) -> None:
    monitor = Monitor(SimpleNamespace(), Target("", "base"), journal)
    monitor.check_list(views(most, tier))
    assert broken(journal) == []
    monitor.check_list(views(most + 1, tier))
    assert len(broken(journal)) == 1


def test_a_version_that_drains_too_long_is_seen(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("soak.invariants.time.monotonic", lambda: now[0])
    monitor = Monitor(SimpleNamespace(), Target("", "base"), journal)
    for at in (0, LONGEST_DRAIN_S - 1):
        now[0] = 100 + at
        monitor.check_list(views(1, "host", "draining"))
    assert broken(journal) == []
    monitor.check_list([])
    now[0] += 2
    monitor.check_list(views(1, "host", "draining"))
    assert broken(journal) == [], "it began again"
    now[0] += LONGEST_DRAIN_S + 1
    monitor.check_list(views(1, "host", "draining"))
    assert broken(journal) == ["nothing waits for ever"]


def test_what_is_served_without_a_lease_is_seen(journal: Journal) -> None:
    claims = Windows()
    world = SimpleNamespace(oracle=SimpleNamespace(of=lambda name: claims))
    monitor = Monitor(world, Target("", "base"), journal)
    for leased in ({"d0", "d1"}, {"d0"}, {"d0", "d1"}, {"d0"}):
        monitor.check_leases(views(2, "store"), leased)
    assert broken(journal) == [], "it was seen between"
    monitor.check_leases(views(2, "store"), {"d0"})
    assert broken(journal) == ["what is served is leased"]
    claims.open(Claim.GIVEN_WAY, 0)
    monitor.check_leases(views(2, "store"), set())
    monitor.check_leases(views(2, "store"), set())
    assert len(broken(journal)) == 1, "copies leave a full disk"


def test_budgets_threads_and_files_that_grow_are_seen(journal: Journal) -> None:
    monitor = Monitor(SimpleNamespace(), Target("", "base"), journal)
    first = Sample(0, 500, 20, 30)
    for more, seen in ((0, 0), (1, 3)):
        monitor.check_metrics({"lora_plugins_host_bytes": HOST_MAX_BYTES + more})
        for threads, files in ((MORE_THREADS + more, 0), (0, MORE_FILES + more)):
            last = Sample(9, 500, 20 + threads, 30 + files)
            check_counts(SimpleNamespace(samples={"engine": [first, last]}), {"engine": first}, journal)
        assert len(broken(journal)) == seen


def test_a_traceback_in_the_log_is_seen(journal: Journal) -> None:
    by = "(EngineCore pid=1) ERROR 11-22 08:33:23 [serving.py:500] "
    one = f'{by}Traceback (most recent call last):\n{by}  File "x.py", line 1\n{by}    f(KeyError)\n{by}KeyError: 3\n'
    other = f"ERROR:    {one.replace(by, '').replace('KeyError: 3', 'asyncio.exceptions.CancelledError')}"
    check_log(f"INFO fine\n{one}INFO more\n{other}", journal)
    assert [found["text"] for found in journal.violations] == ["KeyError: 3", "asyncio.exceptions.CancelledError"]
    check_log(f"INFO fine\nERROR: refused, ValueError: no\n{one.replace('KeyError: 3', 'E: [L001] held')}", journal)
    assert len(journal.violations) == 2


@pytest.mark.parametrize(("cause", "count"), [("HTTPException: 503: [L001] unloaded", 0), ("KeyError: 3", 2)])
def test_stream_that_had_begun_is_judged_by_its_cause(journal: Journal, cause: str, count: int) -> None:
    by = "(APIServer pid=1) ERROR 11-22 08:33:23 [http.py:18] "
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1', cause, ""]
    lines += ["The above exception was the direct cause of the following exception:", ""]
    lines += [*lines[:2], "RuntimeError: Caught handled exception, but response already started."]
    check_log("\n".join(by + line for line in lines), journal)
    assert len(journal.violations) == count
