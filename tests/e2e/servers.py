"""The servers of the end-to-end tests: small ones, so that several run beside each other on two cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from testbed import v2_runner
from testbed.bed import Bed
from testbed.server import ONE_THREAD, VLLM, Server, vllm_server

RESOLVER, MANAGER, KERNELS, ADMIN = "lora_filesystem_resolver", "lora_lru_manager", "lora_kernels", "lora_admin"

# Sixteen requests of 1,000 tokens, in the place of a GiB: an engine fills its cache with zeros as it starts.
BLOCKS = ("--num-gpu-blocks-override", "160")
ENVIRONMENT = ONE_THREAD

# `make test-api-servers`: how many API servers each server has that does not say it itself.
API_SERVERS = os.environ.get("API_SERVERS", "")
# `make test-v2`: every server runs Model Runner V2, with asynchronous scheduling.
RUNS_V2 = os.environ.get("RUNNER") == "v2"


def lora_server(
    bed: Bed,
    home: Path,
    *arguments: str,
    plugins: Sequence[str],
    is_forking: bool = True,
    program: str = VLLM,
    **env: str,
) -> AbstractContextManager[Server]:
    """Over `home / "adapters"` and `home / "store"`; each one started there logs into a file of its own."""
    if API_SERVERS and "--api-server-count" not in arguments:
        (home / "metrics").mkdir(exist_ok=True)
        env = {"PROMETHEUS_MULTIPROC_DIR": str(home / "metrics"), **env}
        arguments = (*arguments, "--api-server-count", API_SERVERS)
    if RUNS_V2:
        env, arguments = {**v2_runner.ENVIRONMENT, **env}, (*v2_runner.ARGUMENTS, *arguments)
    server = vllm_server(
        bed.base,
        home / f"server-{len(list(home.glob('server-*')))}.log",
        arguments=("--enable-lora", "--max-lora-rank", "64", *BLOCKS, *arguments),
        env={
            "VLLM_PLUGINS": ",".join(plugins),
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
            **ENVIRONMENT,
            **env,
        },
        is_forking=is_forking,
        program=program,
    )
    return v2_runner.checked(server) if RUNS_V2 else server


def admin_server(
    bed: Bed, home: Path, *arguments: str, is_forking: bool = True, **env: str
) -> AbstractContextManager[Server]:
    """One with every plugin that the admin API needs, which looks for new versions only when asked to."""
    return lora_server(
        bed,
        home,
        *("--max-cpu-loras", "8", "--max-model-len", "1000"),
        *arguments,
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN),
        is_forking=is_forking,
        **{
            "LORA_PLUGINS_REFRESH_S": "0",
            "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /pause and /resume
            **env,
        },
    )
