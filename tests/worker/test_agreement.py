"""Several workers come to one result for each job, in whatever order they finish, and leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.scheduler.messages import Activated, Failed, Loaded, Report, merged
from lora_plugins.worker.agreement import Agreement

BROKEN, AWAY = InvalidAdapter("nothing that can be read"), SourceUnavailable("slow")


def workers(count: int, asked: int, store: HashStore) -> list[Agreement]:
    return [Agreement(rank, count, store, "engine", is_reporting=rank == asked) for rank in range(count)]


def done(worker: Agreement, report: Report) -> None:
    worker.publish(report)
    worker.done_here(report)


def loaded(
    job: int = 1, size_bytes: int = 10, load_s: float = 0.1, *, rank: int = 0, is_instant: bool = False
) -> Loaded:
    return Loaded(job, size_bytes, is_instant, load_s, rank)


@pytest.fixture
def store() -> Iterator[HashStore]:
    """Nothing of what workers publish is left in it."""
    made = HashStore()
    before = made.num_keys()
    yield made
    assert made.num_keys() == before


def test_one_worker_needs_no_store() -> None:
    alone = Agreement()
    done(alone, loaded())
    done(alone, Activated(2, 0.2))
    done(alone, Failed(3, BROKEN))
    assert alone.reports() == [loaded(), Activated(2, 0.2), Failed(3, BROKEN)]
    assert alone.reports() == []
    alone.done_here(loaded(4), is_wanted=False)
    assert alone.reports() == []
    assert not alone._ending


def test_the_larger_and_the_slower_count() -> None:
    both = merged([loaded(1, 10, 0.5, is_instant=True, rank=16), loaded(1, 30, 0.1, rank=8)])
    assert both == loaded(1, 30, 0.5, rank=16)
    assert merged([Activated(1, 0.1), Activated(1, 0.3)]) == Activated(1, 0.3)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("asked", [0, 1])
def test_reported_once_all_are_done_and_by_one_only(count: int, asked: int, store: HashStore) -> None:
    ranks = workers(count, asked, store)
    for rank, worker in enumerate(ranks):
        assert [reports for each in ranks if (reports := each.reports())] == []
        done(worker, loaded(1, 10 + rank))
    assert [worker.reports() for worker in ranks] == [
        [loaded(1, 10 + count - 1)] if rank == asked else [] for rank in range(count)
    ]
    assert not any(worker.is_waiting for worker in ranks)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_any_workers_failure_fails_the_job_at_once(failing: int, store: HashStore) -> None:
    ranks = workers(3, 0, store)
    done(ranks[failing], Failed(1, BROKEN))
    if failing:
        done(ranks[0], loaded())
    (report,) = ranks[0].reports()
    assert isinstance(report, Failed)
    assert report.error.found == BROKEN.found
    for rank in {1, 2} - {failing}:
        done(ranks[rank], loaded())
        assert ranks[0].reports() == [], "it is said once"


def test_early_publication_is_still_reported(store: HashStore) -> None:
    """The job's thread publishes at any moment between two looks of the loop."""
    asked, other = workers(2, 0, store)
    done(other, loaded())
    asked.publish(loaded())
    assert asked.reports() == []
    asked.done_here(loaded())
    assert asked.reports() == [loaded()]


def test_evicted_jobs_are_not_reported(store: HashStore) -> None:
    asked, other = workers(2, 0, store)
    asked.publish(loaded())
    asked.done_here(loaded(), is_wanted=False)
    assert asked.reports() == []
    assert not asked.is_waiting
    assert store.num_keys() > HashStore().num_keys(), "the other worker is not done"
    done(other, Failed(1, AWAY))
    assert asked.reports() == []


def test_engines_of_one_store_do_not_hear_each_other() -> None:
    store = HashStore()
    one, other = (Agreement(0, 2, store, prefix) for prefix in ("a", "b"))
    done(one, loaded())
    done(other, Activated(1, 0.1))
    assert one.reports() == other.reports() == []


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_many_jobs(seed: int, store: HashStore) -> None:
    """Each rank does its jobs in its own order, noted in the loop at any later moment."""
    choose = random.Random(seed)
    count = choose.choice([2, 3])
    ranks = workers(count, choose.randrange(count), store)
    asked = next(worker for worker in ranks if worker.is_reporting)
    fails = {(rank, job): choose.random() < 0.15 for rank in range(count) for job in range(1, 9)}
    queues: list[list[Report]] = []
    for rank in range(count):
        jobs = choose.sample(range(1, 9), 8)
        queues.append([Failed(job, BROKEN) if fails[rank, job] else loaded(job, rank + 1) for job in jobs])
    unnoted: list[list[Report]] = [[] for _ in ranks]
    said: list[Report] = []
    while any(queues) or any(unnoted):
        rank = choose.randrange(count)
        if queues[rank] and choose.random() < 0.6:
            report = queues[rank].pop(0)
            unnoted[rank].append(report)
            ranks[rank].publish(report)
        elif unnoted[rank]:
            ranks[rank].done_here(unnoted[rank].pop(0))
        said += asked.reports()
    said += asked.reports()
    for job in range(1, 9):
        (of_job,) = [report for report in said if report.job == job]
        if any(fails[rank, job] for rank in range(count)):
            assert isinstance(of_job, Failed)
        else:
            assert of_job == loaded(job, count)
    assert not asked.is_waiting
    assert not asked._ending
