"""Workers that take their time, as `lora_plugins.worker.jobs` does, beside vLLM's real scheduler.

Each batch is checked: its adapters are in their slots, with the weights that its requests' paths name, and its requests
find a KV cache of their own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lora_plugins.errors import InvalidAdapter
from lora_plugins.scheduler.messages import (
    Activate,
    Activated,
    AdapterSpec,
    Command,
    Evict,
    Failed,
    Load,
    Loaded,
    Move,
    Report,
    Slots,
)
from lora_plugins.vllm_patches.engine_core.request import is_in_store, weights_path
from tests.vllm_patches.engine_bed import BLOCK, Engine


@dataclass(eq=False)
class Entry:
    """What a worker has under a key; `content` of the weights, None before the load has ended."""

    spec: AdapterSpec
    key: int
    content: str | None = None
    slot: int | None = None
    is_evicted: bool = False


@dataclass(eq=False)
class Job:
    entry: Entry
    command: Load | Activate
    steps_left: int
    fails: bool


class Workers:
    """Carries commands out: loads and copies take steps, and some fail.

    Args:
        steps_of: how many steps a job takes. fails: whether it fails.
        is_instant: whether an engine id has packed weights.
    """

    def __init__(
        self,
        slots: Slots,
        steps_of: Callable[[Load | Activate], int],
        fails: Callable[[Load | Activate, AdapterSpec], bool],
        is_instant: Callable[[int], bool],
    ) -> None:
        self._slots, self._steps_of, self._fails, self._is_instant = slots, steps_of, fails, is_instant
        self.entries: dict[int, Entry] = {}
        self.contents: dict[int, str] = {}  # of each key, as loaded or moved to last
        self.names: dict[str, str] = {}  # the content that a path of requests has meant so far
        self.owners: dict[int, int | None] = dict.fromkeys(range(slots.total))
        self._jobs: list[Job] = []

    def carry_out(self, commands: Iterable[Command]) -> list[Report]:
        """Return the reports of jobs that have ended by the end of this step."""
        for command in commands:
            match command:
                case Load():
                    assert command.key not in self.entries, "loaded twice"
                    entry = self.entries[command.key] = Entry(command.spec, command.key)
                    self._begin(command, entry)
                case Activate():
                    self._activate(command)
                case Evict():
                    entry = self.entries.pop(command.key)
                    entry.is_evicted = True
                    self._leave(entry)
                case Move():
                    self._move(command)
        ended = [job for job in self._jobs if job.steps_left <= 0]
        self._jobs = [job for job in self._jobs if job.steps_left > 0]
        for job in self._jobs:
            job.steps_left -= 1
        return [self._end(job) for job in ended]

    def content_in_slot(self, key: int) -> str | None:
        """Return the weights with which a batch computes requests of a key; None for no slot of its own."""
        entry = self.entries.get(key)
        is_there = entry is not None and entry.slot is not None and self.owners[entry.slot] == key
        return entry.content if entry is not None and is_there else None

    def _begin(self, command: Load | Activate, entry: Entry) -> None:
        fails = self._fails(command, entry.spec)
        self._jobs.append(Job(entry, command, self._steps_of(command), fails))

    def _activate(self, command: Activate) -> None:
        entry = self.entries[command.key]
        assert entry.content is not None, "activated before the load has ended"
        is_pointed = command.slot >= self._slots.copied
        assert is_pointed == (self._is_instant(entry.spec.engine_id) and self._slots.pointed > 0), "a slot of its kind"
        assert all(job.entry.slot != command.slot for job in self._jobs if isinstance(job.command, Activate)), (
            "written by two threads at a time"
        )
        self._leave(entry)
        for other in self.entries.values():
            if other.slot == command.slot:
                other.slot = None
        entry.slot = command.slot
        self.owners[command.slot] = command.key if command.job is None else None
        if command.job is not None:
            self._begin(command, entry)

    def _move(self, command: Move) -> None:
        source = self.entries.pop(command.source)
        assert source.content is not None, "moved before the load has ended"
        entry = self.entries.setdefault(command.key, Entry(source.spec, command.key))
        self._leave(source)
        source.is_evicted = True
        entry.spec, entry.content = source.spec, source.content
        self.contents[command.key] = source.content

    def _leave(self, entry: Entry) -> None:
        if entry.slot is not None:
            self.owners[entry.slot] = None
        for job in [job for job in self._jobs if job.entry is entry and isinstance(job.command, Activate)]:
            self._jobs.remove(job)  # the worker waits for the end of the job
        entry.slot = None

    def _end(self, job: Job) -> Report:
        command, entry = job.command, job.entry
        number = command.job
        assert number is not None
        if job.fails or entry.is_evicted:
            return Failed(number, InvalidAdapter("a fault of this world", adapter=entry.spec.name))
        if isinstance(command, Load):
            # A directory outside the store has other bytes for each generation.
            path = entry.spec.path
            new = path if is_in_store(path) else f"{path} read for {entry.key}"
            entry.content = self.contents.setdefault(entry.key, new)
            assert entry.content.split(" ")[0] == path, f"{entry.key} has been {entry.content}, and is {path}"
            return Loaded(number, 100, self._is_instant(entry.spec.engine_id), 0.01, rank=8)
        assert entry.slot is not None
        self.owners[entry.slot] = entry.key
        return Activated(number, 0.01)


class SlowEngine(Engine):
    """An engine bed over `Workers`; `weights`: of each token that clients were sent, by request.

    Attributes:
        first_at: the step in which a request was scheduled first.
    """

    def __init__(self, scheduler: Any, workers: Workers | None, lag: int) -> None:
        super().__init__(scheduler, lag=lag)
        self.workers = workers
        self.steps = 0
        self.weights: dict[str, list[str]] = {}
        self.first_at: dict[str, int] = {}
        self._worker_loras: dict[str, int] = {}
        self._kv: dict[int, str] = {}
        self._kv_of_moved: dict[str, set[str]] = {}
        self._weights_of: dict[int, dict[str, str]] = {}  # by the id of the output

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    def step(self) -> dict[str, int]:
        self.steps += 1
        return super().step()

    def update_once(self) -> None:
        self._update()

    def _obey(self, commands: Any) -> None:
        commands = list(commands)
        self.commands += commands
        if self.workers is not None:
            self._reports += self.workers.carry_out(commands)

    def _update(self) -> None:
        output, _ = self._under_way[0]
        before, weights_of = len(self.outputs), self._weights_of.pop(id(output))
        super()._update()
        for one in self.outputs[before:]:
            for _ in one.new_token_ids:
                self.weights.setdefault(one.request_id, []).append(weights_of[one.request_id])

    def _check_adapters(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._worker_loras[new.req_id] = 0 if new.lora_request is None else new.lora_request.lora_int_id
        began_at = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        began_at |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        weights_of, keys = {}, set[int]()
        for name, count in output.num_scheduled_tokens.items():
            self.first_at.setdefault(name, self.steps)
            request = self.scheduler.requests[name]
            lora = request.lora_request
            weights_of[name] = "" if lora is None else weights_path(request)
            content: str | None = ""
            assert self._worker_loras[name] == (0 if lora is None else lora.lora_int_id), "workers know another adapter"
            if self.workers is not None:
                if lora is not None:
                    keys.add(lora.lora_int_id)
                    content = self.workers.content_in_slot(lora.lora_int_id)
                    assert content is not None, f"{name} runs without its adapter {lora.lora_int_id}"
                    meant = self.workers.names.setdefault(weights_of[name], content)
                    assert meant == content, f"{name}: {weights_of[name]} means {meant}, and {content} computes"
                    assert content.split(" ")[0] == weights_of[name].partition("#")[0]
                self._compute(request, began_at[name], count, content)
        if self.workers is not None:
            assert len(keys) <= len(self.workers.owners)
        self._weights_of[id(output)] = weights_of

    def _compute(self, request: Any, begin: int, count: int, weights: str) -> None:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        may_be = self._kv_of_moved.setdefault(request.request_id, set())
        may_be.add(weights)
        is_moved = len(may_be) > 1 and weights_path(request) != request.lora_request.lora_path
        for position in range(begin):
            found = self._kv.get(blocks[position // BLOCK] * BLOCK + position % BLOCK)
            assert found == weights or (is_moved and found in may_be), f"{request.request_id}: a KV cache of {found}"
        for position in range(begin, begin + count):
            self._kv[blocks[position // BLOCK] * BLOCK + position % BLOCK] = weights
