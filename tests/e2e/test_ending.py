"""A server that is told to end, as Kubernetes and systemd tell it, waits neither for a fetch nor for a source."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from testbed import faults
from testbed.bed import Bed
from testbed.client import connect
from testbed.models import PROMPT
from testbed.proxy import fault_proxy
from testbed.s3 import s3_server
from tests.e2e.admin import KEY, Admin
from tests.e2e.servers import ADMIN, BLOCKS, KERNELS, MANAGER, lora_server
from tests.e2e.standing_still import LONGEST_S

S3 = "lora_s3_resolver"
MOST_S = 15.0  # vLLM's own end takes 0.3 s; Python's client of FTP waits for 30 s for each answer
SOON_S = 30  # the rest of a fetch would take four minutes
FILE = """
adapters:
  - name: silent
    uri: ftp://adapters/silent
"""


@pytest.mark.parametrize("plugins", [(S3,), pytest.param((S3, MANAGER, ADMIN), marks=pytest.mark.nightly)])
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


def test_a_server_ends_while_its_sources_stand_still(bed: Bed, tmp_path: Path) -> None:
    """S3 is polled; what is declared below ftp:// is tried again and again by a client that blocks its thread."""
    (tmp_path / "declared.yaml").write_text(FILE)
    with s3_server() as s3, fault_proxy(s3.url) as proxy, socket.create_server(("127.0.0.1", 0)) as silent:
        s3.bucket("adapters").put_directory("loras/cloud", bed.adapters / "sql")
        env = {
            "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
            "LORA_PLUGINS_REFRESH_S": "0.5",
            "LORA_PLUGINS_ADAPTERS_FILE": str(tmp_path / "declared.yaml"),
            "LORA_PLUGINS_ALLOWED_URIS": "ftp://adapters/",
            "LORA_PLUGINS_FETCH_TIMEOUT_S": "2",
            "FSSPEC_FTP_HOST": "127.0.0.1",
            "FSSPEC_FTP_PORT": f"{silent.getsockname()[1]}",
            **s3.env(proxy.url),
        }
        arguments = ("--max-loras", "2", "--max-cpu-loras", "2", "--api-key", KEY)
        plugins = ("lora_s3_resolver", MANAGER, KERNELS, ADMIN)
        with lora_server(bed, tmp_path, *arguments, plugins=plugins, **env) as server:
            Admin(server, connect(server), bed, tmp_path, tmp_path).answers_like("cloud", "sql")
            proxy.plan(faults.stall(60), times=None)
            silent.settimeout(LONGEST_S)
            with silent.accept()[0]:
                began = time.monotonic()
                while not any(request.fault == "stall" and request.ended is None for request in proxy.requests()):
                    assert time.monotonic() - began < LONGEST_S, "no poll"
                    time.sleep(0.1)
                os.kill(server.process.pid, signal.SIGTERM)
                server.process.wait(MOST_S)
