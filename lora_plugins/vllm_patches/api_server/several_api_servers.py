"""`vllm serve` with several API servers: they share the served adapters, and outlive each other's deaths.

Runs in the process of the command `vllm serve`, which starts the engines and the API servers by `run_multi_api_server`
(vllm/entrypoints/cli/serve.py, 0.30 to 0.33). The wrapper gives all API servers a folder to find each other
(`roles.py`), or refuses several where adapters may change and our manager does not plan them.

A follower's death ends no other process, the leader's ends all: the command sees the API servers' processes through a
view whose exit codes say so. A dead API server leaves no listening socket behind: all accept connections of the one
socket that `vllm serve` has opened. In the engine, the leader ends the dead server's requests.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.lifecycle.follower import has_started
from lora_plugins.log import logger
from lora_plugins.plugin_names import ADMIN, MANAGER
from lora_plugins.settings import Settings, named_in_environment
from lora_plugins.vllm_patches.wrapping import Over, wrap

FOLDER = "lora_plugins_folder"  # an attribute of the arguments: where the API servers of one command find each other
# A socket's path has at most 107 bytes; after the directory come the folder's name and the socket's, 40 bytes.
_LONGEST_BYTES = 60
_EXIT_CODE_WAIT_S = 5.0


def patch(cli: Any, settings: Settings) -> None:
    """Have `cli`, the module of the command `vllm serve`, start several API servers our way."""
    wrap(cli, "run_multi_api_server", functools.partial(_run_multi_api_server, settings=settings))


def refuse_several(count: int, asked: str, why: str = "which do not know of each other") -> None:
    """Raise InvalidSettings where several API servers run with `asked`."""
    if count > 1:
        raise InvalidSettings(
            f"{asked} with --api-server-count {count}: API servers {why}",
            expected="one API server, or several of one vllm serve with lora_lru_manager",
            remedy="set --api-server-count 1 (with data parallelism vLLM starts one for each engine), or name "
            "lora_lru_manager in VLLM_PLUGINS",
        )


def that_changes(settings: Settings) -> str | None:
    """Return the plugin or variable by which a server's adapters change; None where they stay as at the start."""
    if named_in_environment(ADMIN):
        return ADMIN
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if settings.runtime_lora_updating else None


def _run_multi_api_server(original: Any, args: Any, *, settings: Settings) -> Any:
    """Start several API servers with a folder to find each other; raise where adapters change and servers cannot share.

    During the call, the module's `envs` says that runtime updating is off, and servers outlive a killed follower
    (`_going_on`). The API servers that start here read the true value of the variable.

    Touches:
        vllm.entrypoints.cli.serve: run_multi_api_server(args) envs
        vllm.envs: VLLM_ALLOW_RUNTIME_LORA_UPDATING
    Why: vLLM refuses runtime updating with several API servers, as each has a table of its own; data parallelism starts
        one API server for each engine, unless --api-server-count 1 is given.
    Until: API servers share what they serve.
    """
    count, changes = args.api_server_count or 1, that_changes(settings)
    is_of_hosts = args.data_parallel_hybrid_lb or args.data_parallel_start_rank is not None
    if changes is not None and is_of_hosts:
        refuse_several(count, changes, "of several hosts, each of which reaches its own engines only")
    if changes is not None and not named_in_environment(MANAGER):
        refuse_several(count, changes, "without lora_lru_manager, whose engine ids would collide")
    if count < 2 or is_of_hosts or not named_in_environment(MANAGER):
        return original(args)
    cli: Any = sys.modules["vllm.entrypoints.cli.serve"]
    envs, wait = cli.envs, cli.wait_for_completion_or_failure
    with tempfile.TemporaryDirectory(prefix="lora-plugins-", dir=_above()) as folder:
        setattr(args, FOLDER, Path(folder))
        cli.envs = _WithoutUpdating(envs)
        cli.wait_for_completion_or_failure = functools.partial(_going_on, wait, folder=Path(folder))
        try:
            return original(args)
        finally:
            cli.envs, cli.wait_for_completion_or_failure = envs, wait


def _going_on(original: Any, api_server_manager: Any, *args: Any, folder: Path, **kwargs: Any) -> None:
    """Wait as vLLM's `wait_for_completion_or_failure` does, for API servers that find each other in this folder.

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
    original(_Servers(api_server_manager, folder), *args, **kwargs)


class _Servers(Over):
    """A view of vLLM's manager of API servers."""

    def __init__(self, manager: Any, folder: Path) -> None:
        super().__init__(manager)
        # vLLM numbers API servers in this order, and number 0 leads.
        self.processes = [_ApiServerProcess(it, folder, leads=not n) for n, it in enumerate(manager.processes)]


class _ApiServerProcess(Over):
    """A view of an API server's process. vLLM reads the exit code once the process's end of `sentinel` is closed.

    No other may serve without the first, whatever its exit code. The others serve on after the death of another one
    that has begun to serve.
    """

    def __init__(self, process: Any, folder: Path, *, leads: bool) -> None:
        super().__init__(process)
        self._folder, self._leads = folder, leads

    @property
    def exitcode(self) -> int | None:
        # The system closes a dying process's files a moment before the exit code is there.
        self._under.join(_EXIT_CODE_WAIT_S)
        code: int | None = self._under.exitcode
        name, pid = self._under.name, self._under.pid
        if self._leads:
            return 1 if code == 0 else code
        if not code or not has_started(self._folder, pid):
            return code
        logger.error("%s (PID: %d) died with exit code %d: its requests fail, the others serve on", name, pid, code)
        return 0


def _above() -> str | None:
    """Return the directory for the folder of the API servers; None for the system's, where a socket's path fits."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_BYTES else None  # noqa: S108 - a folder of ours


class _WithoutUpdating(Over):
    """vLLM's `envs` for the command alone: the command refuses runtime updating with several API servers."""

    VLLM_ALLOW_RUNTIME_LORA_UPDATING = False
