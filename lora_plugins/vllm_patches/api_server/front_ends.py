"""What serves requests without vLLM's API server in Python: resolvers, admin API and access policy are not there.

`ServeSubcommand.validate` (vllm/entrypoints/cli/serve.py, 0.30 to 0.33) is wrapped: startup fails before anything is
loaded.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.plugin_names import ADMIN, FILESYSTEM, HUB, S3
from lora_plugins.settings import Settings, named_in_environment
from lora_plugins.vllm_patches.api_server.access import configured

_CLI = "vllm.entrypoints.cli.serve"
_GRPC = "smg_grpc_servicer.vllm.servicer"  # vLLM's gRPC server imports it before plugins are loaded
_RUST = "vllm-rs"


def patch(settings: Settings) -> None:
    """Refuse what would leave out what was asked for; manager and kernels alone run with any front end.

    Raises:
        InvalidSettings: this process is such a server, or the engine of one.
    """
    asked = [name for name in (FILESYSTEM, S3, HUB, ADMIN) if named_in_environment(name)] + configured(settings)
    if not asked:
        return
    if _GRPC in sys.modules:
        raise _refusal("vLLM's gRPC server", asked, "start vllm serve without --grpc")
    if _parent() == _RUST:
        raise _refusal(f"{_RUST} serve", asked, "start vllm serve")
    cli: Any = sys.modules.get(_CLI)
    if cli is not None and not hasattr(cli.ServeSubcommand.validate, "__wrapped__"):
        cli.ServeSubcommand.validate = _refusing(cli.ServeSubcommand.validate, asked)


def _refusing(original: Any, asked: list[str]) -> Any:
    @functools.wraps(original)
    def validate(self: Any, args: Any) -> None:
        from vllm import envs

        if getattr(args, "grpc", False):
            raise _refusal("vllm serve --grpc", asked, "leave --grpc out")
        if envs.VLLM_USE_RUST_FRONTEND and not args.headless and args.api_server_count != 0:
            raise _refusal("VLLM_USE_RUST_FRONTEND=1", asked, "unset VLLM_USE_RUST_FRONTEND")
        original(self, args)

    return validate


def _refusal(front_end: str, asked: list[str], remedy: str) -> InvalidSettings:
    names = ", ".join(asked)
    return InvalidSettings(
        f"{front_end} with {names}, which it would not keep to",
        expected="vLLM's API server in Python, where resolvers, admin API and access policy run",
        remedy=f"{remedy}, or go without {names} (lora_lru_manager and lora_kernels run with any front end)",
    )


def _parent() -> str:
    """The name of the program that started this one; empty where the system does not say."""
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


LEDGER = (
    Patch(
        """
        vllm.entrypoints.cli.serve:
            ServeSubcommand.validate(self, args)
        vllm.envs:
            VLLM_USE_RUST_FRONTEND
        """,
        what="wrapped: with a resolver, lora_admin or a policy it raises for --grpc and for the front end in Rust; the "
        "gRPC server and vllm-rs, which start without it, are known by an imported module and by the parent process",
        why="requests do not pass vLLM's API server there, so what was asked for would be left out without a word",
        remove="these front ends ask resolvers, and have endpoint plugins",
    ),
)
