"""Several API servers of one vLLM: each has a table of adapters of its own, so none of them may change.

`run_multi_api_server` (vllm/entrypoints/cli/serve.py, 0.30 to 0.33) is wrapped: startup fails before an engine loads.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.plugin_names import ADMIN
from lora_plugins.settings import Settings, named_in_environment

_CLI = "vllm.entrypoints.cli.serve"


def patch(settings: Settings) -> None:
    """Have `vllm serve` refuse what could not be right; of other processes, nothing is imported or changed."""
    cli: Any = sys.modules.get(_CLI)
    if cli is not None and not hasattr(cli.run_multi_api_server, "__wrapped__"):
        cli.run_multi_api_server = _refusing(cli.run_multi_api_server, settings)


def refuse_several(count: int, asked: str) -> None:
    """Raise InvalidSettings where what was asked for has several API servers."""
    if count > 1:
        raise InvalidSettings(
            f"{asked} with --api-server-count {count}: each server would know its own adapters only",
            expected="one API server, which knows all adapters",
            remedy="set --api-server-count 1 (with data parallelism vLLM starts one for each engine), or leave "
            "lora_admin and VLLM_ALLOW_RUNTIME_LORA_UPDATING out and name adapters with --lora-modules",
        )


def _refusing(original: Any, settings: Settings) -> Any:
    @functools.wraps(original)
    def run_multi_api_server(args: Any) -> Any:
        if named_in_environment(ADMIN):
            refuse_several(args.api_server_count or 1, ADMIN)
        elif settings.runtime_lora_updating:
            refuse_several(args.api_server_count or 1, "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        return original(args)

    return run_multi_api_server


LEDGER = (
    Patch(
        "vllm.entrypoints.cli.serve: run_multi_api_server(args)",
        what="wrapped: with lora_admin, or where adapters may change, it raises before an engine is started",
        why="vLLM says that runtime updating cannot be used, not what to do: data parallelism starts one API server "
        "for each engine, unless --api-server-count 1 is given",
        remove="API servers share what they serve",
    ),
)
