"""The servers of `benchmarks/front_ends/measure.py`: several API servers that know of each other, or one."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.bed import Bed
from testbed.server import ONE_THREAD, Server, plugged, vllm_server

COUNT = 4
PLUGINS = "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin"
END_S = 240.0  # for a server that must start or end


@contextlib.contextmanager
def serving(
    bed: Bed, home: Path, *arguments: str, count: int = COUNT, is_forking: bool = True, **env: str
) -> Iterator[Server]:
    """A server with `count` API servers over the adapters and the store in `home`; a forked one starts in seconds."""
    (home / "adapters").mkdir(parents=True, exist_ok=True)
    log = home / f"server-{len(list(home.glob('server-*')))}.log"
    if count > 1:
        # vLLM makes one before it spawns its API servers; a forked one has imported prometheus_client before.
        env["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(dir=home)
    with vllm_server(
        bed.base,
        log,
        arguments=(
            *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4", "--max-cpu-loras", "16"),
            *("--max-num-seqs", "64", "--served-model-name", "base", "--api-server-count", str(count)),
            *arguments,
        ),
        env={
            **plugged(PLUGINS, home / "store", home / "adapters"),
            **ONE_THREAD,
            "LORA_PLUGINS_REFRESH_S": "0",
            **env,
        },
        is_forking=is_forking,
    ) as server:
        ends_at = time.monotonic() + END_S
        while server.log().count("Application startup complete") < count:  # the port answers as soon as one listens
            assert time.monotonic() < ends_at, server.log()[-2000:]
            time.sleep(0.1)
        yield server
