"""The process `vllm serve` above several API servers: a follower's death ends no other process, the leader's end all.

vLLM's `wait_for_completion_or_failure` ends all API servers and engines where one process has ended with another exit
code than 0, and goes on without a process after exit code 0. The function gets the API servers with exit codes that say
what the others can do without the dead process.

A dead API server leaves no listening socket behind: all accept connections of the one socket that `vllm serve` has
opened. In the engine, the leader ends the dead server's requests (`roles.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_plugins.log import logger
from lora_plugins.server.follower import has_started
from lora_plugins.vllm_patches.wrapping import Over

_END_S = 5.0


def going_on(original: Callable[..., None], folder: Path) -> Callable[..., None]:
    """Return vLLM's `wait_for_completion_or_failure` for API servers that find each other in this folder.

    After its start, an API server other than the first counts as ended with exit code 0, and the first as ended with 1.
    Read in 0.30 to 0.33, run in 0.32: vLLM reads only `processes` of the manager, in the order of the API servers'
    numbers, and of each process only `sentinel`, `name`, `pid` and, after its end, `exitcode`.

    Touches:
        vllm.entrypoints.cli.serve: wait_for_completion_or_failure
        vllm.v1.utils: wait_for_completion_or_failure(api_server_manager, engine_manager, coordinator)
            APIServerProcessManager{processes}
    Why: vLLM goes on without a process after exit code 0 only: a killed API server ended all, and a first API server
        that ended with 0 left the others without names.
    Until: vLLM goes on without a dead API server, or starts another in its place.
    """

    def wait_for_completion_or_failure(api_server_manager: Any, *args: Any, **kwargs: Any) -> None:
        original(_Servers(api_server_manager, folder), *args, **kwargs)

    return wait_for_completion_or_failure


class _Servers(Over):
    """A view of vLLM's manager of API servers."""

    def __init__(self, manager: Any, folder: Path) -> None:
        super().__init__(manager)
        first, *others = manager.processes  # vLLM numbers API servers in this order, and number 0 leads
        self.processes = [_FirstProcess(first), *(_OtherProcess(process, folder) for process in others)]


class _Ended(Over):
    """A view of an API server's process. vLLM reads the exit code once the process's end of `sentinel` is closed."""

    def _code(self) -> int | None:
        # The system closes a dying process's files a moment before the exit code is there.
        self._under.join(_END_S)
        code: int | None = self._under.exitcode
        return code


class _FirstProcess(_Ended):
    """The first API server: no other may serve without the first, whatever its exit code."""

    @property
    def exitcode(self) -> int | None:
        code = self._code()
        return 1 if code == 0 else code


class _OtherProcess(_Ended):
    """Another API server: the others serve on after its death, once it has begun to serve."""

    def __init__(self, process: Any, folder: Path) -> None:
        super().__init__(process)
        self._folder = folder

    @property
    def exitcode(self) -> int | None:
        code, name, pid = self._code(), self._under.name, self._under.pid
        if not code or not has_started(self._folder, pid):
            return code
        logger.error("%s (PID: %d) died with exit code %d: its requests fail, the others serve on", name, pid, code)
        return 0
