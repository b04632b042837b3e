"""Several workers of one engine (tensor or pipeline parallelism) agree on the result of a job.

Only one worker's output reaches the scheduler, so that one has to know of the others. Each publishes its own results
under the job's number in the key-value store by which torch.distributed met; so it does not matter in which order, at
which step, or in which thread they finish, and no worker waits for another. Source: torch.distributed's `Store`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any, Protocol

from lora_plugins.errors import InvalidSettings
from lora_plugins.scheduler.messages import Failed, Report, merged


class KeyValueStore(Protocol):
    """The part of torch.distributed's `Store` that is used."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(slots=True)
class Agreement:
    """Results by job, of all workers together.

    Args:
        rank: this worker's, of `world_size`. store: None where there is one worker only.
        prefix: keeps the engines of one store apart.
        is_reporting: whether this worker's output reaches the scheduler. It alone reports, and deletes what others
            have published.
    """

    rank: int = 0
    world_size: int = 1
    store: KeyValueStore | None = None
    prefix: str = ""
    is_reporting: bool = True
    _waiting: list[Report] = field(default_factory=list)  # done here, and not everywhere
    _ending: set[int] = field(default_factory=set)  # jobs that nothing more is reported of

    @property
    def is_waiting(self) -> bool:
        """Whether something that was done here is not done everywhere."""
        return bool(self._waiting)

    def publish(self, report: Report) -> None:
        """Publish the result of a job here; called in the background."""
        if self.store is not None:
            # What is published is of our own processes, over the store that they trust for everything else.
            self.store.set(self._key(report.job, self.rank), pickle.dumps(report))

    def done_here(self, report: Report, *, is_wanted: bool = True) -> None:
        """Note the result of a job here; nothing is reported of one that is not wanted any more.

        Called, as `reports`, in the engine loop, after `publish` or before.
        """
        if not self.is_reporting:
            return
        if is_wanted:
            self._waiting.append(report)
        else:
            self._ending.add(report.job)

    def reports(self) -> list[Report]:
        """What is done everywhere since the last call, in the order in which it was done here."""
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
        """The result of a job everywhere, of which this is the one here; None while a worker is not done yet."""
        if self.store is None:
            return report
        published = [self._published(report.job, rank) for rank in range(self.world_size)]
        failed = next((one for one in (report, *published) if isinstance(one, Failed)), None)
        if failed is not None:
            return failed
        done = [one for one in published if one is not None]
        return merged(done) if len(done) == self.world_size else None

    def _end(self, job: int) -> bool:
        """Delete what was published of a job; whether all have published by now."""
        if self.store is not None:
            keys = [self._key(job, rank) for rank in range(self.world_size)]
            if not self.store.check(keys):
                return False
            for key in keys:
                self.store.delete_key(key)
        return True

    def _published(self, job: int, rank: int) -> Report | None:
        key = self._key(job, rank)
        if self.store is None or not self.store.check([key]):
            return None
        published: Report = pickle.loads(self.store.get(key))  # noqa: S301 - see publish
        return published

    def _key(self, job: int, rank: int) -> str:
        return f"{self.prefix}/{job}/{rank}"


def agreement_of(vllm_config: Any) -> Agreement:
    """For this process, whose workers have met.

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
    asked = parallel.world_size - parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    return Agreement(
        rank=parallel.rank,
        world_size=parallel.world_size,
        store=distributed_c10d._get_default_store(),  # noqa: SLF001 - torch names no public way to it
        prefix=f"lora_plugins/{parallel.data_parallel_rank}",  # engines may share one store
        is_reporting=parallel.rank == asked,
    )
