"""A server that is told to end while an adapter is on its way: nobody waits for the rest of the fetch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from testbed import faults
from testbed.bed import Bed
from testbed.models import PROMPT
from testbed.proxy import fault_proxy
from testbed.s3 import s3_server
from tests.e2e.servers import ADMIN, BLOCKS, MANAGER, lora_server

S3 = "lora_s3_resolver"
SOON_S = 30  # the rest of a fetch would take four minutes


@pytest.mark.parametrize("plugins", [(S3,), (S3, MANAGER, ADMIN)])
def test_a_server_told_to_end_waits_for_no_fetch(bed: Bed, tmp_path: Path, plugins: Sequence[str]) -> None:
    with s3_server() as s3, fault_proxy(s3.url) as proxy, ThreadPoolExecutor() as clients:
        files = {file.name: file.read_bytes() for file in (bed.adapters / "wide").iterdir()}
        s3.bucket("adapters").put_many("wide", files)
        proxy.plan(faults.throttle(8_000), path="safetensors")
        settings = {"S3_PATH_TEMPLATE": "s3://adapters/{lora_name}", **s3.env(proxy.url)}
        with lora_server(bed, tmp_path, *BLOCKS, plugins=plugins, **settings) as server:
            body = {"model": "wide", "prompt": PROMPT}
            # While vLLM ends, it may answer 500 itself, or cut the connection.
            clients.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=2 * SOON_S, trust_env=False)
            while not proxy.count("GET", "safetensors"):
                time.sleep(0.05)
            os.kill(server.process.pid, signal.SIGTERM)
            told = time.monotonic()
            server.process.wait(SOON_S)
            assert time.monotonic() - told < SOON_S
