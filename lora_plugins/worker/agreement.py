"""Several workers of one engine (tensor or pipeline parallelism) agree on the result of a job (`worker/jobs.py`).

Each worker's threads call `publish` at the end of a job, and its engine loop then calls `done_here`. In the
reporting worker, whose output reaches the scheduler, the loop gets by `reports` the results that all workers have. A
single worker gets its own results at once.

Only one worker's output reaches the scheduler, so the reporting worker has to know of the others. Each worker publishes
its own results under the job's number, in the key-value store by which torch.distributed met. So neither order, step
nor thread of the results matters, and no worker waits for another. Source: torch.distributed's `Store`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.scheduler.messages import Failed, Report, merged


@dataclass(slots=True)
class Agreement:
    """Results by job, of all workers together.

    Args:
        rank: this worker's, of `world_size`. store: torch.distributed's; None for a single worker.
        prefix: keeps the engines of one store apart.
        is_reporting: whether this worker's output reaches the scheduler. The reporting worker alone reports, and
            deletes all published results.
    """

    rank: int = 0
    world_size: int = 1
    store: Any = None
    prefix: str = ""
    is_reporting: bool = True
    _waiting: list[Report] = field(default_factory=list)  # done here, and not yet on every worker
    # Jobs without a further report, whose published results are still to be deleted.
    _ending: set[int] = field(default_factory=set)
    _lost_count: int = 0  # other workers' `publish_lost` that `lost_elsewhere` has returned

    @property
    def is_waiting(self) -> bool:
        """Whether the reporting worker has a result that another worker has not published; False in the others."""
        return bool(self._waiting)

    def publish(self, report: Report) -> None:
        """Publish the result of a job here; called in the background."""
        if self.store is not None:
            # pickle is safe here: only our own processes publish, and the workers trust the store for everything else.
            self.store.set(self._key(report.job, self.rank), pickle.dumps(report))

    def publish_lost(self, report: Failed) -> None:
        """Publish, before a batch, that a slot for it could not be written here, if another worker reports."""
        if self.store is not None and not self.is_reporting:
            number = self.store.add(f"{self.prefix}/lost", 1)
            self.store.set(f"{self.prefix}/lost/{number}", pickle.dumps(report))

    def lost_elsewhere(self) -> list[Report]:
        """Return what other workers have published by `publish_lost` since the last call, mostly in one round trip.

        Complete for a batch once the batch's result is here, although no worker waits for this answer: a batch's
        collectives need every worker, and each worker publishes before its part of the batch. With asynchronous
        scheduling the launch of the batch is too early for the call.
        """
        # Adding 0 reads the counter.
        first, self._lost_count = self._lost_count + 1, self.store.add(f"{self.prefix}/lost", 0)
        keys = [f"{self.prefix}/lost/{number}" for number in range(first, self._lost_count + 1)]
        reports = [pickle.loads(self.store.get(key)) for key in keys]  # noqa: S301 - see publish
        for key in keys:
            self.store.delete_key(key)
        return reports

    def done_here(self, report: Report, *, is_wanted: bool = True) -> None:
        """Note the result of a job here; an unwanted result is never reported.

        The engine loop calls `done_here` and `reports`, after `publish` or before.
        """
        if not self.is_reporting:
            return
        if is_wanted:
            self._waiting.append(report)
        else:
            # All workers publish the result of an evicted adapter too; `reports` deletes the results after the last.
            self._ending.add(report.job)

    def reports(self) -> list[Report]:
        """Return the results that all workers have since the last call, in this worker's order."""
        reports, waiting = [], []
        for report in self._waiting:
            of_all = self._of_all(report)
            if of_all is None:
                waiting.append(report)
            else:
                reports.append(of_all)
                self._ending.add(report.job)
        self._waiting = waiting
        self._ending = {job for job in self._ending if not self._end(job)}
        return reports

    def _of_all(self, report: Report) -> Report | None:
        """Return the result of all workers, given this worker's `report`; None while a worker has none."""
        if self.store is None:
            return report
        keys = [self._key(report.job, rank) for rank in range(self.world_size)]
        published = [pickle.loads(self.store.get(key)) for key in keys if self.store.check([key])]  # noqa: S301 - see publish
        # A single failure fails the job at once: the scheduler need not wait for slower workers.
        failed = next((one for one in (report, *published) if isinstance(one, Failed)), None)
        if failed is not None:
            return failed
        return merged(published) if len(published) == self.world_size else None

    def _end(self, job: int) -> bool:
        """Delete all published results of a job; return False while a worker has still to publish."""
        if self.store is not None:
            keys = [self._key(job, rank) for rank in range(self.world_size)]
            # Deleting earlier would leave the late worker's key in the store for ever.
            if not self.store.check(keys):
                return False
            for key in keys:
                self.store.delete_key(key)
        return True

    def _key(self, job: int, rank: int) -> str:
        return f"{self.prefix}/{job}/{rank}"


def agreement_of(vllm_config: Any) -> Agreement:
    """Return the agreement of this process, whose workers have met.

    Raises:
        InvalidSettings: workers that met in another way than by torch.distributed (elastic expert parallelism).
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return Agreement()
    from torch import distributed
    from torch.distributed import distributed_c10d

    if not distributed.is_initialized():
        raise InvalidSettings(
            "several workers without torch.distributed, as with elastic expert parallelism",
            expected="workers that can agree on what was loaded",
            remedy="leave --enable-elastic-ep out, or lora_lru_manager",
        )
    # The rank that vLLM asks for outputs: the first of the last pipeline stage (`_get_output_rank` of its executors,
    # 0.30 to 0.33).
    asked = parallel.world_size - parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    return Agreement(
        rank=parallel.rank,
        world_size=parallel.world_size,
        store=distributed_c10d._get_default_store(),  # noqa: SLF001 - torch has no public name for the store
        prefix=f"lora_plugins/{parallel.data_parallel_rank}",  # engines may share one store
        is_reporting=parallel.rank == asked,
    )
