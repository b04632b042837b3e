"""Ends of loads, reported before the end of the step: a caller that waits for a load is answered at once.

A worker sends its report over a local socket of the engine core's process, by Python's `multiprocessing.connection`,
which checks a key; there a thread resolves the futures of these callers. The planner gets the report with the step's
output as always.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import ProcessError
from multiprocessing.connection import Client, Listener
from typing import Any

from lora_plugins.log import logger
from lora_plugins.scheduler.messages import Command, Failed, Load, Loaded, Report, ReportAddress, merged
from lora_plugins.scheduler.planner import Planner


def send_early(address: ReportAddress, report: Report) -> None:
    """Send a report, from a worker; one that does not arrive costs its reader the rest of the step."""
    try:
        with Client(address.address, authkey=address.key) as connection:
            connection.send(report)
    except (OSError, EOFError, ProcessError) as error:
        logger.debug("The end of a load was not reported early: %s", error)


@dataclass(slots=True)
class _Waiting:
    futures: list[Future[Any]]
    loaded: list[Loaded] = field(default_factory=list)


class EarlyLoadReports:
    """Resolves the futures of urgent calls by what workers report.

    Args:
        world_size: workers, all of which have to have an adapter.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        key = os.urandom(32)
        # In Linux's abstract namespace: there is no file that could be left behind.
        address = f"\0lora-plugins-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = Listener(address, "AF_UNIX", authkey=key)
        self._address = ReportAddress(address, key)
        threading.Thread(target=self._listen, daemon=True, name="lora-plugins-early-reports").start()

    def with_addresses(self, commands: Sequence[Command], planner: Planner) -> list[Command]:
        """The same commands, where loads that callers wait for have the address to report to."""
        return [self._with_address(command, planner) for command in commands]

    def _with_address(self, command: Command, planner: Planner) -> Command:
        if not isinstance(command, Load) or (adapter := planner.adapters.get(command.spec.engine_id)) is None:
            return command
        futures: list[Future[Any]] = [call.future for call in adapter.calls if call.is_urgent and not call.needs_slot]
        if not futures:
            return command
        with self._lock:
            self._waiting[command.job] = _Waiting(futures)
        return replace(command, early_report_to=self._address)

    def _listen(self) -> None:
        while True:
            try:
                with self._listener.accept() as connection:
                    self._received(connection.recv())
            except Exception:  # noqa: BLE001 - the planner gets the report too; the next one is to be received
                logger.debug("An early report was not understood", exc_info=True)

    def _received(self, report: Any) -> None:
        with self._lock:
            waiting = self._waiting.get(report.job)
            if waiting is None:
                return
            if isinstance(report, Loaded):
                waiting.loaded.append(report)
                if len(waiting.loaded) < self._world_size:
                    return
            del self._waiting[report.job]
        for future in waiting.futures:
            with suppress(InvalidStateError):  # the planner was faster, or the caller waits no more
                if isinstance(report, Failed):
                    future.set_exception(report.error)
                else:
                    future.set_result(merged([*waiting.loaded]))
