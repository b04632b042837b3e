"""Names whose requests wait for a resume in vLLM's queue: they take neither slots nor room from others.

A pause is of a name, so requests that come during a pause get the version that the name has at the resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.adapter import Adapter
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
    held: dict[str, tuple[str, Any]] = field(default_factory=dict)  # client and request, by id: came during the pause
    calls: list[Future[bool]] = field(default_factory=list)
    clients: frozenset[str] = frozenset()  # clients' requests of which some engine had a part as the pause began


class Pauses:
    """The pauses of one engine; running requests, and requests that wait for a slot, are the planner's."""

    def __init__(self, state: PlannerState) -> None:
        self._state = state
        self._pauses: dict[str, _Pause] = {}
        self._names: dict[str, str] = {}  # of held requests, by id
        self._answering: dict[str, None] = {}  # names with calls

    def __bool__(self) -> bool:
        return bool(self._pauses)

    @property
    def held_count(self) -> int:
        """How many requests came after their name was paused, and wait for a resume."""
        return len(self._names)

    @property
    def held(self) -> list[Any]:
        """The requests that came after their name was paused."""
        return [self._pauses[name].held[request_id][1] for request_id, name in self._names.items()]

    @property
    def expects_parts(self) -> bool:
        """Whether a call waits for the next part of a client's request, which may never come."""
        return bool(self._state.expecting and self._answering)

    def holds(self, name: str, client: str = "") -> bool:
        """Return whether a request waits for a resume; in mode WAIT, parts of a running client's request run."""
        pause = self._pauses.get(name)
        if pause is None:
            return False
        # A beam whose next part waited for the resume would never end, and the pause waits for the beam's end.
        if pause.mode is not PauseMode.WAIT or not client:
            return True
        return client not in pause.clients and client not in self.clients(name)

    def clients(self, name: str, *, with_waiting: bool = False) -> set[str]:
        """Return the clients' requests of a name with a part in flight, perhaps with a waiting part too."""
        clients = {client for adapter in self.in_flight(name) for client in adapter.clients}
        if with_waiting:
            adapters = self._state.of_name(name)
            held = [held for adapter in adapters for held in (*adapter.held.values(), *adapter.stopped.values())]
            clients |= {it.client for it in held} | {client for client, _ in self._pauses[name].held.values()}
        return clients - {""}

    def join(self, name: str, clients: Iterable[str]) -> list[Any] | None:
        """Let parts of these clients' requests run, and return the parts held already; None but in mode WAIT.

        An engine knows what it runs: the next part of a client's request may go to an engine that runs none so far. In
        mode ABORT the parts end: the client's request would wait for a held part until the resume.
        """
        pause = self._pauses.get(name)
        if pause is None or pause.mode is PauseMode.KEEP:
            return None
        pause.clients = frozenset(clients)
        of_clients = [key for key, (client, _) in pause.held.items() if client in pause.clients]
        parts = [pause.held.pop(key)[1] for key in of_clients if self._names.pop(key)]
        if pause.mode is PauseMode.WAIT:
            return parts
        self._state.refused += [(part, None) for part in parts]
        return None

    def hold(self, name: str, request_id: str, request: Any, client: str = "") -> None:
        """Have a request that comes, perhaps as part of a client's, wait for the resume of its name, or end."""
        pause = self._pauses[name]
        if pause.mode is PauseMode.ABORT and client in pause.clients:
            self._state.refused.append((request, None))
        else:
            pause.held[request_id] = client, request
            self._names[request_id] = name

    def ended(self, request_id: str) -> None:
        """Drop a request that has left vLLM's scheduler, in whatever way; ids that no pause holds are left alone."""
        if (name := self._names.pop(request_id, None)) is not None:
            del self._pauses[name].held[request_id]

    def pause(self, name: str, mode: PauseMode) -> list[str]:
        """Begin a pause, or change its mode; return the ids of all requests that the name has by now."""
        pause = self._pauses.setdefault(name, _Pause(mode))
        pause.mode = mode
        adapters = self._state.of_name(name)
        return [*pause.held, *(key for it in adapters for key in (*it.stopped, *it.held, *it.running))]

    def resume(self, name: str) -> list[Any]:
        """End a pause; return the requests that came during the pause."""
        pause = self._pauses.pop(name, None)
        if pause is None:
            return []
        self._answer(name, pause)
        for request_id in pause.held:
            del self._names[request_id]
        return [request for _, request in pause.held.values()]

    def paused(self, name: str) -> Future[bool]:
        """Done once no request of the name runs, or the pause has ended; False where the answer took a wait."""
        future: Future[bool] = Future()
        if (pause := self._pauses.get(name)) is None or not self.in_flight(name):
            future.set_result(True)
        else:
            pause.calls.append(future)
            self._answering[name] = None
        return future

    def answer(self) -> None:
        """Answer the calls whose name has nothing in flight any more."""
        for name in [name for name in self._answering if not self.in_flight(name)]:
            self._answer(name, self._pauses[name])

    def _answer(self, name: str, pause: _Pause) -> None:
        self._answering.pop(name, None)
        calls, pause.calls = pause.calls, []
        for call in calls:
            if not call.done():
                call.set_result(False)

    def in_flight(self, name: str) -> list[Adapter]:
        """Return the generations of a name that run requests, or have requests that have run and go on."""
        return [it for it in self._state.of_name(name) if it.goes_on]
