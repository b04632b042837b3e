"""A server with every plugin that the admin API needs, over adapters and a store of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from testbed.bed import Bed
from testbed.server import Server, vllm_server


def admin_server(bed: Bed, home: Path, *arguments: str, **env: str) -> AbstractContextManager[Server]:
    """Over `home / "adapters"` and `home / "store"`; each one started there logs into a file of its own."""
    return vllm_server(
        bed.base,
        home / f"server-{len(list(home.glob('server-*')))}.log",
        arguments=(
            *("--enable-lora", "--max-lora-rank", "64", "--max-cpu-loras", "8", "--max-model-len", "1000"),
            *arguments,
        ),
        env={
            "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
            "LORA_PLUGINS_REFRESH_S": "0",
            "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /pause and /resume
            **env,
        },
    )
