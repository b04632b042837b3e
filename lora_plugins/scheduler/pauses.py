"""Pauses of adapter names in one engine: which requests wait for a resume, and who waits until nothing runs.

Runs in the engine core process, beside the planner, for `vllm_patches/engine_core/`. Requests that come while their
name is paused are held here, in vLLM's queue but in no group that runs, and take neither slots nor room. Held requests
belong to a name, not to a version: after the resume they get the version that the name has then. The planner keeps the
requests that came before the pause.

vLLM divides a client's request with several choices or beams into parts, which are requests of their own. A part of a
client's request that ran as the pause began is treated as the request is: it runs, ends or waits with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lora_plugins.scheduler.planner import Planner


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
    clients: frozenset[str] = frozenset()  # clients' requests of which some engine had a part as the pause began


@dataclass(frozen=True, slots=True)
class _PausedRequest:
    """A request that came during the pause of a name, perhaps as part of a client's."""

    name: str
    client: str
    request: Any


class Pauses:
    """The pauses of one engine; running requests, and requests that wait for a slot, are the planner's."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._pauses: dict[str, _Pause] = {}
        self._held: dict[str, _PausedRequest] = {}  # by the requests' ids
        self._calls: dict[str, list[Future[bool]]] = {}  # of who waits until no request of a name runs

    @property
    def held(self) -> list[Any]:
        """The requests that came after their name was paused, and wait for a resume."""
        return [held.request for held in self._held.values()]

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def expects_parts(self) -> bool:
        """Whether a call waits for the next part of a client's request, which may never come."""
        return bool(self._planner.state.expecting and self._calls)

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
        adapters = self._planner.state.of_name(name)
        clients = {client for adapter in adapters if adapter.goes_on for client in adapter.clients}
        if with_waiting:
            clients |= {it.client for adapter in adapters for it in (*adapter.held.values(), *adapter.stopped.values())}
            clients |= {held.client for held in self._held.values() if held.name == name}
        return clients - {""}

    def join(self, name: str, clients: Iterable[str]) -> list[Any] | None:
        """Note which clients' requests run in some engine; return held parts of these requests that may run now.

        An engine knows only what it runs itself, and the next part of a client's request may go to another engine. In
        mode ABORT the held parts end here, without an error: the client's request would wait for a part until the
        resume. None without a pause, and in the modes in which no part runs.
        """
        pause = self._pauses.get(name)
        if pause is None or pause.mode is PauseMode.KEEP:
            return None
        pause.clients = frozenset(clients)
        parts = self._take(name, pause.clients)
        if pause.mode is PauseMode.WAIT:
            return parts
        for part in parts:
            self._planner.state.refuse(part, None)
        return None

    def hold(self, name: str, request_id: str, request: Any, client: str = "") -> None:
        """Have a request that comes, perhaps as part of a client's, wait for the resume of its name, or end."""
        pause = self._pauses[name]
        if pause.mode is PauseMode.ABORT and client in pause.clients:
            self._planner.state.refuse(request, None)
        else:
            self._held[request_id] = _PausedRequest(name, client, request)

    def ended(self, request_id: str) -> None:
        """Drop a request that has left vLLM's scheduler, in whatever way; ids that no pause holds are left alone."""
        self._held.pop(request_id, None)

    def pause(self, name: str, mode: PauseMode) -> list[str]:
        """Begin a pause, or change its mode; return the ids of all requests that the name has by now."""
        self._pauses.setdefault(name, _Pause(mode)).mode = mode
        adapters = self._planner.state.of_name(name)
        return [*self._ids(name), *(key for it in adapters for key in (*it.stopped, *it.held, *it.running))]

    def resume(self, name: str) -> list[Any]:
        """End a pause; return the requests that came during the pause."""
        self._pauses.pop(name, None)
        self._answer(name)
        return self._take(name)

    def paused(self, name: str) -> Future[bool]:
        """Return a future that is done once no request of the name runs, or the pause has ended.

        The result is True where nothing ran from the beginning, False after a wait.
        """
        future: Future[bool] = Future()
        if name in self._pauses and self._is_in_flight(name):
            self._calls.setdefault(name, []).append(future)
        else:
            future.set_result(True)
        return future

    def answer(self) -> None:
        for name in [name for name in self._calls if not self._is_in_flight(name)]:
            self._answer(name)

    def _answer(self, name: str) -> None:
        for call in self._calls.pop(name, ()):
            if not call.done():
                call.set_result(False)

    def _is_in_flight(self, name: str) -> bool:
        return any(it.goes_on for it in self._planner.state.of_name(name))

    def _ids(self, name: str, clients: Collection[str] | None = None) -> list[str]:
        held = [(key, it) for key, it in self._held.items() if it.name == name]
        return [key for key, it in held if clients is None or it.client in clients]

    def _take(self, name: str, clients: Collection[str] | None = None) -> list[Any]:
        """Hold the requests of a name, perhaps of these clients only, no more; return the requests."""
        return [self._held.pop(request_id).request for request_id in self._ids(name, clients)]
