"""`vllm serve` with several API servers, and its refusal of front ends without our code.

Runs in the process of the command `vllm serve`, before engines and API servers start: `ServeSubcommand.validate` and
`run_multi_api_server` are wrapped (vllm/entrypoints/cli/serve.py, 0.30 to 0.33), so an error here fails the start
before an engine loads. In front ends other than vLLM's API server in Python, resolvers, admin API and access policy
are not there: they are refused where one of those is asked for.

Several API servers share their adapters (`roles.py`) where our manager plans them; otherwise no server may change
them. A follower's death ends no other process, the leader's ends all: the process above the API servers sees them
through a view whose exit codes say so. A dead API server leaves no listening socket behind: all accept connections of
the one socket that `vllm serve` has opened. In the engine, the leader ends the dead server's requests.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from lora_plugins.api.access.administrators import ADMIN_KEY
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.lifecycle import declared_file
from lora_plugins.lifecycle.follower import has_started
from lora_plugins.log import logger
from lora_plugins.plugin_names import ADMIN, MANAGER, RESOLVERS
from lora_plugins.process import Process
from lora_plugins.settings import Settings, named_in_environment
from lora_plugins.vllm_patches.wrapping import Over, wrap

_CLI = "vllm.entrypoints.cli.serve"
_GRPC = "smg_grpc_servicer.vllm.servicer"  # vLLM's gRPC server: imported before plugins are loaded
_RUST = "vllm-rs"
# A socket's path has at most 107 bytes; after the directory come the folder's name and the socket's, 40 bytes.
_LONGEST_BYTES = 60
_END_S = 5.0
FOLDER = "lora_plugins_folder"  # an attribute of the arguments: where the API servers of one command find each other


def patch(settings: Settings) -> None:
    """Refuse front ends without the plugins asked for; manager and kernels alone run with any front end.

    Raises:
        InvalidSettings: the process is such a front end, or the engine of a front end.
    """
    asked = [name for name in (*RESOLVERS, ADMIN) if named_in_environment(name)] + configured(settings)
    # Only the process of the command `vllm serve` has the module.
    cli: Any = sys.modules.get(_CLI)
    if cli is not None and (asked or named_in_environment(MANAGER)):
        wrap(cli, "run_multi_api_server", functools.partial(_run_multi_api_server, settings=settings))
    if not asked:
        return
    if _GRPC in sys.modules:
        raise _refusal("vLLM's gRPC server", asked, "start vllm serve without --grpc")
    if _parent() == _RUST:
        raise _refusal(f"{_RUST} serve", asked, "start vllm serve")
    if cli is not None:
        wrap(cli.ServeSubcommand, "validate", functools.partial(_validate, asked=asked))


def say_errors_in_a_line() -> None:
    """Have `vllm serve` end with an error of ours in a line, without a traceback, and exit code 1 as before.

    The traceback of a variable that cannot be right shows vLLM's code and ours, and hides the line to read. With
    VLLM_LOGGING_LEVEL=DEBUG it comes first.

    Touches: vllm.envs: VLLM_LOGGING_LEVEL
    Why: vLLM lets errors of plugins through, and Python prints 33 lines before the one to read.
    Until: vLLM ends with the text of a plugin's error.
    """
    before = sys.excepthook
    if _CLI not in sys.modules or parent_process() is not None or getattr(before, "func", None) is _say:
        return
    sys.excepthook = functools.partial(_say, before)


def _say(before: Any, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    from vllm import envs

    if not isinstance(error, LoRAPluginsError) or envs.VLLM_LOGGING_LEVEL == "DEBUG":
        before(kind, error, traceback)
    if isinstance(error, LoRAPluginsError):
        sys.stderr.write(f"error: {error}\nlora-plugins explain {error.code}\n")


def refuse_several(count: int, asked: str, why: str = "which do not know of each other") -> None:
    """Raise InvalidSettings where several API servers run with `asked`."""
    if count > 1:
        raise InvalidSettings(
            f"{asked} with --api-server-count {count}: API servers {why}",
            expected="one API server, or several of one vllm serve with lora_lru_manager",
            remedy="set --api-server-count 1 (with data parallelism vLLM starts one for each engine), or name "
            "lora_lru_manager in VLLM_PLUGINS",
        )


def require_in_force(process: Process) -> None:
    """Refuse to start a server whose settings have a policy, a key or a declared set, and which does not enforce them.

    vLLM goes on without an endpoint plugin that is unnamed, or fails to load.

    Raises:
        InvalidSettings: nobody has called `access.install` in this process.
    """
    if process.lets_in_administrators_only:
        return
    for name in configured(process.settings):
        raise InvalidSettings(
            f"{name} in a process that does not keep to it",
            expected="an API server with lora_admin",
            remedy="name lora_admin in VLLM_PLUGINS, see the log for why it does not load, or unset the variable",
        )


def configured(settings: Settings) -> list[str]:
    """Return the set variables that need an API server with `lora_admin`."""
    values = {
        "LORA_PLUGINS_POLICY": settings.policy,
        ADMIN_KEY: settings.admin_key,
        declared_file.VARIABLE: settings.adapters_file,
    }
    return [name for name, value in values.items() if value is not None]


def _validate(original: Any, self: Any, args: Any, *, asked: list[str]) -> None:
    """Raise for `--grpc` and for the front end in Rust, with a resolver, `lora_admin` or a policy.

    The gRPC server and `vllm-rs` start without this command: an imported module and the parent process give them away.

    Touches:
        vllm.entrypoints.cli.serve: ServeSubcommand.validate(self, args)
        vllm.envs: VLLM_USE_RUST_FRONTEND
    Why: requests do not pass vLLM's API server there, so what was asked for would be left out without a word.
    Until: these front ends ask resolvers, and have endpoint plugins.
    """
    from vllm import envs

    if getattr(args, "grpc", False):
        raise _refusal("vllm serve --grpc", asked, "leave --grpc out")
    if envs.VLLM_USE_RUST_FRONTEND and not args.headless and args.api_server_count != 0:
        raise _refusal("VLLM_USE_RUST_FRONTEND=1", asked, "unset VLLM_USE_RUST_FRONTEND")
    original(self, args)


def _run_multi_api_server(original: Any, args: Any, *, settings: Settings) -> Any:
    """Give several API servers a folder to find each other, and have vLLM start them with runtime updating.

    The others outlive one that is killed (`_going_on`).

    Meanwhile the module's `envs` says that runtime updating is off. Where adapters may change, without
    `lora_lru_manager` or on several hosts, the wrapper raises before an engine starts.

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
    cli: Any = sys.modules[_CLI]
    envs, wait = cli.envs, cli.wait_for_completion_or_failure
    with tempfile.TemporaryDirectory(prefix="lora-plugins-", dir=_above()) as folder:
        setattr(args, FOLDER, Path(folder))
        # The module's global, not the variable: the API servers that start here must read the true value.
        cli.envs = _WithoutUpdating(envs)
        cli.wait_for_completion_or_failure = _going_on(wait, Path(folder))
        try:
            return original(args)
        finally:
            cli.envs, cli.wait_for_completion_or_failure = envs, wait


def _going_on(original: Callable[..., None], folder: Path) -> Callable[..., None]:
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
        # vLLM numbers API servers in this order, and number 0 leads.
        self.processes = [
            _ApiServerProcess(process, folder, leads=not n) for n, process in enumerate(manager.processes)
        ]


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
        self._under.join(_END_S)
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


def that_changes(settings: Settings) -> str | None:
    """Return the plugin or variable by which a server's adapters change; None where they stay as at the start."""
    if named_in_environment(ADMIN):
        return ADMIN
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if settings.runtime_lora_updating else None


class _WithoutUpdating(Over):
    """vLLM's `envs` for the command alone: the command refuses runtime updating with several API servers."""

    VLLM_ALLOW_RUNTIME_LORA_UPDATING = False


def _refusal(front_end: str, asked: list[str], remedy: str) -> InvalidSettings:
    names = ", ".join(asked)
    return InvalidSettings(
        f"{front_end} with {names}, which it would not keep to",
        expected="vLLM's API server in Python, where resolvers, admin API and access policy run",
        remedy=f"{remedy}, or go without {names} (lora_lru_manager and lora_kernels run with any front end)",
    )


def _parent() -> str:
    """Return the name of the parent process's program; empty where the system does not say."""
    try:
        # Linux cuts the name after 15 characters; `vllm-rs` has 7.
        return Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
