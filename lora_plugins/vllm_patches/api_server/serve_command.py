"""What `vllm serve` refuses with our plugins: front ends without our code, and settings that nobody would enforce.

`patch` runs in every process as plugins are loaded, and acts in three: in the command `vllm serve`, where
`ServeSubcommand.validate` is wrapped (vllm/entrypoints/cli/serve.py, 0.30 to 0.33), so that the start fails before an
engine loads; in vLLM's gRPC server; and in the engine of the front end in Rust. In front ends other than vLLM's API
server in Python, resolvers, admin API and access policy are not there. `require_in_force` runs as an API server
starts.
"""

from __future__ import annotations

import functools
import os
import sys
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from lora_plugins.api.access.administrators import ADMIN_KEY
from lora_plugins.errors import InvalidSettings, LoRAPluginsError
from lora_plugins.lifecycle import declared_file
from lora_plugins.plugin_names import ADMIN, MANAGER, RESOLVERS
from lora_plugins.process import Process
from lora_plugins.settings import Settings, named_in_environment
from lora_plugins.vllm_patches.api_server import several_api_servers
from lora_plugins.vllm_patches.wrapping import wrap

_CLI = "vllm.entrypoints.cli.serve"
_GRPC = "smg_grpc_servicer.vllm.servicer"  # vLLM's gRPC server: imported before plugins are loaded
_RUST = "vllm-rs"


def patch(settings: Settings) -> None:
    """Refuse front ends without the plugins asked for; manager and kernels alone run with any front end.

    Raises:
        InvalidSettings: the process is such a front end, or the engine of a front end.
    """
    asked = [name for name in (*RESOLVERS, ADMIN) if named_in_environment(name)] + configured(settings)
    # Only the process of the command `vllm serve` has the module.
    cli: Any = sys.modules.get(_CLI)
    if cli is not None and (asked or named_in_environment(MANAGER)):
        several_api_servers.patch(cli, settings)
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
