"""Adapters that a caller's code adds in a worker itself, past the scheduler's plan, until the scheduler plans them.

A trainer may call `add_lora` or `remove_lora` on each worker by `collective_rpc`. The worker loads the adapter within
the call, and `GivenAdapters` keeps the adapter. After the call the engine core takes the changes
(`vllm_patches/engine_core/given_adapters.py`), numbers them alike in all workers, and plans a `Load` with the number;
`worker/jobs.py` then takes the adapter of that number. All calls are in the engine loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lora_plugins.scheduler.messages import AdapterSpec, Change
from lora_plugins.worker.loaded_adapter import LoadedAdapter


class GivenAdapters:
    """The adapters that one worker was given, or had to remove, past the plan."""

    def __init__(self) -> None:
        self._changes: list[tuple[Change, LoadedAdapter | None]] = []  # of which the engine core does not know
        self._numbered: dict[int, tuple[int, LoadedAdapter]] = {}  # with their engine ids; not loaded by the plan yet

    @property
    def engine_ids(self) -> set[int]:
        """The engine ids of adapters that are here and not planned."""
        added = {change.engine_id for change, adapter in self._changes if adapter is not None}
        return added | {engine_id for engine_id, _ in self._numbered.values()}

    def add(self, spec: AdapterSpec, adapter: LoadedAdapter) -> None:
        self._changes.append((Change(spec.engine_id, spec), adapter))

    def remove(self, engine_id: int) -> None:
        """Drop what is here of an engine id, and have the planner do the same."""
        self.forget([number for number, (of, _) in self._numbered.items() if of == engine_id])
        self._changes = [(change, None if change.engine_id == engine_id else it) for change, it in self._changes]
        self._changes.append((Change(engine_id), None))

    def take_changes(self, first_number: int) -> list[Change]:
        """Return additions and removals since the last call, in order, numbered from `first_number`."""
        changes, self._changes = self._changes, []
        taken = []
        for number, (change, adapter) in enumerate(changes, first_number):
            if adapter is not None:
                self._numbered[number] = change.engine_id, adapter
            spec = None if change.spec is None else replace(change.spec, given=number)
            taken.append(Change(change.engine_id, spec))
        return taken

    def take(self, number: int) -> LoadedAdapter | None:
        """Return a numbered adapter, which the plan has from now on; None where it was dropped."""
        return self._numbered.pop(number, (0, None))[1]

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._numbered.pop(number, None)
