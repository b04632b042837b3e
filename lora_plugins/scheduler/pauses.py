"""Names whose requests are held until a resume, outside the plan: they take neither slots nor room from others.

A pause is of a name, so the pause holds requests for each version that the name gets meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.adapter import Adapter
from lora_plugins.scheduler.futures import resolve
from lora_plugins.scheduler.state import PlannerState


class PauseMode(StrEnum):
    """How a pause treats the requests that came before."""

    WAIT = "wait"
    """Running requests end by themselves; held requests stay held."""
    ABORT = "abort"
    """All requests are aborted."""
    KEEP = "keep"
    """Requests stop, and go on after the resume."""


@dataclass(eq=False, slots=True)
class _Pause:
    mode: PauseMode
    held: dict[str, Any] = field(default_factory=dict)  # requests that came during the pause, by id
    calls: list[Future[None]] = field(default_factory=list)


class Pauses:
    """The pauses of one engine; running requests, and requests that wait for a slot, are the planner's."""

    def __init__(self, state: PlannerState) -> None:
        self._state = state
        self._pauses: dict[str, _Pause] = {}

    def __bool__(self) -> bool:
        return bool(self._pauses)

    @property
    def held_count(self) -> int:
        """How many requests wait for a resume."""
        return sum(len(pause.held) for pause in self._pauses.values()) + self._state.stopped_count

    @property
    def held_by_name(self) -> Counter[str]:
        """How many requests wait for a resume, by name of adapter."""
        counts = Counter({name: len(pause.held) for name, pause in self._pauses.items()})
        counts.update({it.spec.name: len(it.stopped) for it in self._state.adapters.values() if it.stopped})
        return +counts

    @property
    def held(self) -> list[Any]:
        """The requests that came after their name was paused."""
        return [request for pause in self._pauses.values() for request in pause.held.values()]

    @property
    def expects_parts(self) -> bool:
        """Whether a call waits for the next part of a client's request, which may never come."""
        return bool(self._state.expecting) and any(pause.calls for pause in self._pauses.values())

    def holds(self, name: str, client: str = "") -> bool:
        """Return whether a request waits for a resume; in mode WAIT, parts of a running client's request run."""
        pause = self._pauses.get(name)
        if pause is None:
            return False
        # A beam whose next part waited for the resume would never end, and the pause waits for the beam's end.
        if pause.mode is not PauseMode.WAIT or not client:
            return True
        return not any(client in adapter.clients for adapter in self.in_flight(name))

    def hold(self, name: str, request_id: str, request: Any) -> None:
        """Have a request that comes wait for the resume of its name."""
        self._pauses[name].held[request_id] = request

    def ended(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have left vLLM's scheduler, in whatever way; ids that no pause holds are left alone."""
        for pause in self._pauses.values():
            for request_id in request_ids:
                pause.held.pop(request_id, None)

    def pause(self, name: str, mode: PauseMode) -> list[str]:
        """Begin a pause, or change its mode; return the ids of all requests that the name has by now."""
        pause = self._pauses.setdefault(name, _Pause(mode))
        pause.mode = mode
        adapters = [it for it in self._state.adapters.values() if it.spec.name == name]
        return [*pause.held, *(key for it in adapters for key in (*it.stopped, *it.held, *it.running))]

    def resume(self, name: str) -> list[Any]:
        """End a pause; return the requests that came during the pause."""
        pause = self._pauses.pop(name, None)
        if pause is None:
            return []
        resolve(pause.calls)
        return list(pause.held.values())

    def paused(self, name: str) -> Future[None]:
        """Done once no request of the name runs, or the pause has ended."""
        future: Future[None] = Future()
        if (pause := self._pauses.get(name)) is None:
            future.set_result(None)
        else:
            pause.calls.append(future)
            self.answer()
        return future

    def answer(self) -> None:
        """Answer the calls whose name has nothing in flight any more."""
        for name, pause in self._pauses.items():
            if pause.calls and not self.in_flight(name):
                resolve(pause.calls)
                pause.calls = []

    def in_flight(self, name: str) -> list[Adapter]:
        """Return the generations of a name that have requests in flight."""
        return [adapter for adapter in self._state.in_flight if adapter.spec.name == name]

    def to_stop(self) -> list[Adapter]:
        """The adapters whose requests are to stop now and go on later."""
        return [
            it for name, pause in self._pauses.items() if pause.mode is PauseMode.KEEP for it in self.in_flight(name)
        ]
